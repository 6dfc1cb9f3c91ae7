from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.http.connections import Connections
from tests.dpu_gateway.harness import MODEL, gateway, until
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.support.stand_in_engine import Behaviour


class Peer:
    def __init__(self) -> None:
        self.hung_up = False

    def hang_up(self) -> None:
        self.hung_up = True


def test_the_longest_idle_one_gives_way_and_one_that_serves_never() -> None:
    connections, peers = Connections(3), [Peer() for _ in range(6)]
    for peer in peers[:3]:
        connections.opened(peer)
    connections.busy(peers[0])
    connections.opened(peers[3])
    assert [peer.hung_up for peer in peers] == [False, True, False, False, False, False]
    connections.closed(peers[1])
    connections.busy(peers[2])
    connections.idle(peers[2])  # later than the third came
    connections.opened(peers[4])
    assert peers[3].hung_up
    connections.closed(peers[3])
    for peer in (peers[2], peers[4]):
        connections.busy(peer)
    connections.opened(peers[5])
    assert peers[5].hung_up  # all others serve
    assert not any(peer.hung_up for peer in (peers[0], peers[2], peers[4]))


@given(st.lists(st.tuples(st.sampled_from("obic"), st.integers(0, 9)), max_size=80), st.integers(1, 5))
def test_no_more_are_open_than_may_be(events: list[tuple[str, int]], most: int) -> None:
    connections = Connections(most)
    live: dict[int, Peer] = {}
    busy: set[int] = set()
    for kind, number in events:
        if kind == "o" and number not in live:
            live[number] = Peer()
            connections.opened(live[number])
        elif kind == "b" and number in live:
            busy.add(number)
            connections.busy(live[number])
        elif kind == "i" and number in busy:
            busy.remove(number)
            connections.idle(live[number])
        elif kind == "c" and number in live:
            connections.closed(live.pop(number))
            busy.discard(number)
        for gone in [number for number, peer in live.items() if peer.hung_up]:
            assert gone not in busy
            connections.closed(live.pop(gone))  # as the transport says soon
        assert len(live) <= most


async def test_connections_over_the_limit_close_idle_ones_and_leave_streams_alone() -> None:
    async with (
        gateway(Behaviour(tokens_per_second=50), http_max_connections=20) as system,
        openai_client(system) as client,
        http_client(system) as other,
    ):
        stream = await client.completions.create(model=MODEL, prompt="abc", max_tokens=40, stream=True)
        path = str(system.http_socket())
        idle = [await asyncio.open_unix_connection(path) for _ in range(60)]
        assert (await other.get("/health")).status_code == 200
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
        await until(lambda: sum(reader.at_eof() for reader, _ in idle) >= 40)
        for _, writer in idle:
            writer.close()

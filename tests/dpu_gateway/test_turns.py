from __future__ import annotations

import asyncio

from services.dpu_gateway.streams import RequestName, Stream
from services.dpu_gateway.turns import STREAMS_PER_TURN, Turns


def fed_stream(number: int) -> Stream:
    stream = Stream(RequestName("", str(number)), slot=number, position=0, tag=1, span=0, with_logprobs=False)
    stream.feed_tokens([number])
    return stream


async def test_streams_are_woken_in_order_a_few_in_each_round_of_the_event_loop() -> None:
    turns, order = Turns(), []
    rounds = 0

    async def send(stream: Stream) -> None:
        await stream.wait()
        order.append((stream.slot, rounds))
        stream.take_tokens()

    streams = [fed_stream(number) for number in range(3 * STREAMS_PER_TURN)]
    sending = [asyncio.create_task(send(stream)) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams:
        turns.add(stream)
    while len(order) < len(streams):
        await asyncio.sleep(0)
        rounds += 1
    await asyncio.gather(*sending)
    assert [slot for slot, _ in order] == list(range(len(streams)))
    in_round = [[slot for slot, seen in order if seen == round_] for round_ in range(rounds)]
    assert max(map(len, in_round)) == STREAMS_PER_TURN


async def test_what_was_added_while_others_wait_for_their_turn_comes_after_them() -> None:
    turns = Turns()
    early = [fed_stream(number) for number in range(STREAMS_PER_TURN + 1)]
    for stream in early:
        turns.add(stream)
    await asyncio.sleep(0)
    late = fed_stream(99)
    turns.add(late)
    await asyncio.wait_for(late.wait(), 1)
    assert all(stream._changed for stream in early)


async def test_a_stream_that_has_sent_everything_already_is_left_asleep() -> None:
    turns = Turns()
    sent, waiting = fed_stream(0), fed_stream(1)
    turns.add(sent)
    turns.add(waiting)
    sent.take_tokens()
    await asyncio.wait_for(waiting.wait(), 1)
    assert not sent._changed

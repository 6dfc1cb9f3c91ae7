"""The load generator against a server with known delays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from services.cli.bench.fleet import fleet
from services.cli.bench.generator import Share, run_load
from services.cli.bench.kinds import Prompts, Protocol
from services.cli.bench.measure import Repeat, summarize
from services.cli.bench.outcome import Outcome
from services.cli.bench.report import Slo
from services.cli.bench.target import Target
from services.cli.bench.workload import Request
from tests.cli.bench.stand_in_server import StandInServer

FIRST, GAP, TOKENS = 0.08, 0.02, 5


def target(server: StandInServer, protocol: Protocol = Protocol.COMPLETIONS) -> Target:
    prompts = Prompts.TEXT if protocol is Protocol.CHAT else Prompts.IDS
    return Target(protocol, server.url, "m", prompts, 1000, temperature=0.0, ignore_eos=True, timeout=60.0)


def loaded(server: StandInServer, requests: Sequence[Request], protocol: Protocol, processes: int = 2) -> list[Share]:
    with fleet(processes, target(server, protocol)) as running:
        return running.run(requests)


def spaced(count: int, gap: float) -> list[Request]:
    return [Request(index * gap, 3, TOKENS, seed=index) for index in range(count)]


@pytest.mark.parametrize("protocol", [Protocol.COMPLETIONS, Protocol.CHAT])
def test_times_are_the_servers_delays_and_what_lies_between_the_two_clocks_readings(protocol: Protocol) -> None:
    requests = [Request(index * 0.03, 3, 3 + index, seed=index) for index in range(6)]
    with StandInServer(FIRST, GAP).running() as server:
        shares = loaded(server, requests, protocol)
    outcomes = {outcome.output_tokens: outcome for share in shares for outcome in share.outcomes}
    assert len(shares) == 2
    assert len(outcomes) == len(server.served) == 6
    for served in server.served:
        outcome = outcomes[served.body["max_tokens"]]
        assert (outcome.prompt_tokens, outcome.error) == (7, "")
        assert outcome.scheduled <= outcome.sent <= served.received
        assert outcome.ttft >= FIRST
        assert outcome.arrivals[0] >= served.sent[0]
        assert outcome.arrivals[-1] >= served.sent[-1]
        assert len(outcome.arrivals) <= outcome.output_tokens  # tokens that a busy machine reads together count once
        assert outcome.tpot is not None
        assert outcome.end_to_end == pytest.approx(outcome.ttft + outcome.tpot * (outcome.output_tokens - 1))


def test_arrivals_do_not_wait_for_answers() -> None:
    """No answer begins before the last request has come: whoever waits for one would wait for ever."""
    with StandInServer(wait_for=40).running() as server:
        shares = loaded(server, spaced(40, 0.005), Protocol.COMPLETIONS)
    assert all(outcome.good for share in shares for outcome in share.outcomes)
    assert all(outcome.lateness >= 0 for share in shares for outcome in share.outcomes)  # nor are any sent early


def test_every_prompt_is_another_one_and_as_long_as_asked() -> None:
    with StandInServer().running() as server:
        loaded(server, [Request(0.0, length, 1, seed=length) for length in (5, 50, 500)], Protocol.COMPLETIONS)
    prompts = {len(served.body["prompt"]): served.body["prompt"] for served in server.served}
    assert set(prompts) == {5, 50, 500}
    assert prompts[500][:5] != prompts[5] != prompts[50][:5]
    assert all(0 < index < 1000 for index in prompts[500])


@pytest.mark.parametrize(
    ("server", "error"), [(StandInServer(refuse=429), "HTTP 429"), (StandInServer(cut_after=2), "ClientPayloadError")]
)
def test_what_is_refused_or_cut_short_is_a_failure_by_name(server: StandInServer, error: str) -> None:
    with server.running():
        shares = loaded(server, spaced(4, 0.0), Protocol.COMPLETIONS)
    point = summarize(1.0, [Repeat(shares, None, None)], Slo(ttft_ms=1e6, tpot_ms=None), 1.0, None)
    assert point.failed == {error: 4}
    assert point.ttft_ms is None
    assert point.slo_share is not None
    assert point.slo_share.mean == 0


class BusyClient:
    """A client that blocks its process for a while with every request, as one that has too much to do."""

    seconds = 0.02

    def prepare(self, request: Request) -> None:
        return None

    async def ask(self, prepared: object, outcome: Outcome) -> None:
        outcome.sent = time.monotonic()
        outcome.arrivals = [outcome.sent + 0.001]
        outcome.output_tokens = 1
        time.sleep(self.seconds)  # noqa: ASYNC251 - the fault that is to be seen
        outcome.ended = time.monotonic()

    async def close(self) -> None:
        await asyncio.sleep(0)


async def test_a_slow_client_is_seen_in_its_own_figures_and_not_in_the_servers() -> None:
    share = await run_load(BusyClient(), [(0.0, None)] * 10, time.monotonic())
    lateness = [outcome.lateness for outcome in share.outcomes]
    assert all(late >= BusyClient.seconds * index for index, late in enumerate(lateness))
    assert max(share.loop_delays, default=0.0) >= BusyClient.seconds or not share.loop_delays
    point = summarize(1.0, [Repeat([share], None, None)], None, 0.01, None)
    assert not point.client.ok
    assert point.client.lateness_p99_ms > 100
    assert point.ttft_ms is not None
    assert point.ttft_ms.p999.mean == pytest.approx(1.0)

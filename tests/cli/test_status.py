"""``blink status`` against a real gateway over the stand-in engine."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess

import pytest
from blink.v1 import control_pb2
from rich.console import Console

from services.cli.errors import CommandError
from services.cli.status import Sample, render, require_healthy
from tests.cli.run_blink import BLINK, assert_one_line_failure, blink
from tests.dpu_gateway.harness import Gateway, collect, gateway, max_tokens, text_request, until


def address(system: Gateway) -> str:
    return f"unix:{system.directory / 'api-0.sock'}"


async def status(system: Gateway, *arguments: str) -> subprocess.CompletedProcess[str]:
    narrow = {"COLUMNS": "80"}
    return await asyncio.to_thread(blink, "status", *arguments, "--address", address(system), environment=narrow)


def text(before: Sample, now: Sample) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(render(before, now))
    return stream.getvalue()


async def test_it_shows_the_engine_and_every_lane() -> None:
    async with gateway() as system:
        await collect(system.inference().Generate(text_request(stop=max_tokens(20))))
        done = await status(system)
        machine = await status(system, "--json")
    assert done.returncode == 0
    assert "READY" in done.stdout
    assert "8 of 8 free" in done.stdout  # of the one lane that has a gateway
    load = json.loads(machine.stdout)
    assert (load["engine_state"], load["generated_tokens"], load["lanes"][0]["attached"]) == (
        "ENGINE_STATE_READY",
        "20",
        True,
    )


async def test_a_dead_engine_is_said_and_fails() -> None:
    async with gateway(heartbeat_timeout=1.0) as system:
        await system.kill_engine()
        await until(lambda: system.workers[0].link.session is None)
        done = await status(system)
    assert "UNREACHABLE" in done.stdout
    assert_one_line_failure(done, "dead or unreachable")


def test_no_gateway_is_one_clear_line() -> None:
    assert_one_line_failure(blink("status", "--address", "127.0.0.1:1"), "127.0.0.1:1", "services.cli up")


async def test_watching_goes_on_while_the_engine_is_away() -> None:
    async with gateway(heartbeat_timeout=1.0) as system:
        command = [*BLINK, "status", "--watch", "--interval", "0.1", "--address", address(system)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        try:
            await asyncio.wait_for(process.stdout.readuntil(b"READY"), 30)
            await system.kill_engine()
            await asyncio.wait_for(process.stdout.readuntil(b"UNREACHABLE"), 30)
        finally:
            process.terminate()
            await process.communicate()


async def test_no_line_wraps_or_ends_in_blanks_and_json_has_the_definitions_order() -> None:
    async with gateway() as system:
        done = await status(system)
        machine = await status(system, "--json")
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    assert [line for line in done.stdout.splitlines() if line.startswith(" " * 11)] == []
    load = json.loads(machine.stdout)
    assert list(load) == [field.name for field in control_pb2.GetLoadResponse.DESCRIPTOR.fields]
    assert list(load["lanes"][0]) == [field.name for field in control_pb2.LaneLoad.DESCRIPTOR.fields]
    assert list(load["overload"]) == [field.name for field in control_pb2.Overload.DESCRIPTOR.fields]


def test_what_the_gateway_refused_is_shown_with_its_causes_and_what_to_do() -> None:
    load = control_pb2.GetLoadResponse(overload=control_pb2.Overload(no_slot=336, queue_full=2), rejected_requests=1)
    shown = text(Sample(load, 1.0), Sample(load, 2.0))
    assert "1 by the engine, 338 (336 no slot, 2 queue full) by this gateway worker" in shown
    assert "slots_per_lane" in shown


def test_rates_are_over_the_time_between_two_samples_and_not_over_a_restart() -> None:
    def load(epoch: int, tokens: int) -> control_pb2.GetLoadResponse:
        lane = control_pb2.LaneLoad(lane=0, attached=True, generated_tokens=tokens)
        return control_pb2.GetLoadResponse(
            engine_state=control_pb2.ENGINE_STATE_READY, engine_epoch=epoch, generated_tokens=tokens, lanes=[lane]
        )

    assert "50.0 generated" in text(Sample(load(1, 100), 10.0), Sample(load(1, 200), 12.0))
    assert "- generated" in text(Sample(load(1, 100), 10.0), Sample(load(2, 200), 12.0))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (control_pb2.ENGINE_STATE_BOOTING, "still starting"),
        (control_pb2.ENGINE_STATE_FAILED, "failed"),
        (control_pb2.ENGINE_STATE_UNREACHABLE, "no heartbeat for 2.5 s"),
    ],
)
def test_whatever_is_not_healthy_fails_in_words(state: control_pb2.EngineState, words: str) -> None:
    with pytest.raises(CommandError, match=words):
        require_healthy(control_pb2.GetLoadResponse(engine_state=state, engine_epoch=1, heartbeat_age_ms=2500))
    require_healthy(control_pb2.GetLoadResponse(engine_state=control_pb2.ENGINE_STATE_DRAINING))

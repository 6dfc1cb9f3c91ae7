"""``blink status``: what the engine is doing, as the gateway sees it in the ring."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import grpc
from blink.v1 import control_pb2, control_pb2_grpc
from google.protobuf.json_format import MessageToJson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.errors import CommandError, from_rpc

CALL_SECONDS = 3.0
RATE_SECONDS = 0.5  # between the two samples that give tokens/s
HEALTHY = {control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING}


@dataclass(frozen=True)
class Sample:
    """One answer of GetLoad and when it came, in seconds of a monotonic clock."""

    load: control_pb2.GetLoadResponse
    taken_at: float


def status(address: str, watch: bool, interval: float, as_json: bool) -> None:
    """Run the command. Raises CommandError when the gateway or the engine is not there."""
    with grpc.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        if watch:
            _watch(stub, address, interval)
            return
        now = take(stub, address)
        if as_json:
            print(MessageToJson(now.load, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        else:
            before = now
            time.sleep(RATE_SECONDS)
            now = take(stub, address)
            Console().print(render(before, now))
        require_healthy(now.load)


def take(stub: control_pb2_grpc.ControlStub, address: str) -> Sample:
    """Ask once. Raises CommandError."""
    try:
        load = stub.GetLoad(control_pb2.GetLoadRequest(), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error, address) from error
    return Sample(load, time.monotonic())


def require_healthy(load: control_pb2.GetLoadResponse) -> None:
    """Raises CommandError, saying what is wrong, unless the engine works."""
    if load.engine_state in HEALTHY:
        return
    since = f"no heartbeat for {load.heartbeat_age_ms / 1000:.1f} s" if load.engine_epoch else "none is attached"
    reasons = {
        control_pb2.ENGINE_STATE_BOOTING: "the engine is still starting",
        control_pb2.ENGINE_STATE_FAILED: "the engine has failed; its log says why",
        control_pb2.ENGINE_STATE_UNREACHABLE: f"the engine is dead or unreachable: {since}",
    }
    raise CommandError(reasons.get(load.engine_state, f"the engine is in unknown state {load.engine_state}"))


def render(before: Sample, now: Sample) -> RenderableType:
    """The picture of one moment; rates are over the time since ``before``."""
    load = now.load
    seconds = max(now.taken_at - before.taken_at, 1e-9)
    # A restarted engine counts from 0 again.
    same_engine = before.load.engine_epoch == load.engine_epoch

    def rate(new: int, old: int) -> str:
        return f"{(new - old) / seconds:.1f}" if same_engine and new >= old else "-"

    name = control_pb2.EngineState.Name(load.engine_state).removeprefix("ENGINE_STATE_")
    facts = Table.grid(padding=(0, 2))
    rows = (
        ("engine", Text(name, "green" if load.engine_state in HEALTHY else "bold red")),
        ("heartbeat", f"{load.heartbeat_age_ms} ms ago"),
        ("requests", f"{load.running_requests} running, {load.waiting_requests} waiting"),
        ("slots", f"{load.free_slots} of {load.total_slots} free"),
        ("KV pages", f"{load.free_kv_pages} of {load.total_kv_pages} free"),
        (
            "tokens/s",
            f"{rate(load.generated_tokens, before.load.generated_tokens)} generated, "
            f"{rate(load.prompt_tokens, before.load.prompt_tokens)} prompt",
        ),
        (
            "in all",
            f"{load.generated_tokens} generated, {load.prompt_tokens} prompt tokens, {load.steps} steps, "
            f"{load.preemptions} preemptions, {load.rejected_requests} rejected",
        ),
    )
    for row in rows:
        facts.add_row(*row)
    lanes = Table(box=None, pad_edge=False)
    for heading in ("lane", "gateway", "running", "waiting", "tokens", "tokens/s", "log backlog"):
        lanes.add_column(heading, justify="left" if heading == "gateway" else "right")
    earlier = {lane.lane: lane.generated_tokens for lane in before.load.lanes}
    for lane in load.lanes:
        lanes.add_row(
            str(lane.lane),
            "attached" if lane.attached else "-",
            str(lane.running_requests),
            str(lane.waiting_requests),
            str(lane.generated_tokens),
            rate(lane.generated_tokens, earlier.get(lane.lane, 0)),
            str(lane.log_backlog),
        )
    return Group(facts, Text(), lanes)


def _watch(stub: control_pb2_grpc.ControlStub, address: str, interval: float) -> None:
    """Redraw until interrupted; an engine or gateway that goes away is shown and waited for."""
    console = Console()
    with Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext() as live:
        last: Sample | None = None
        while True:
            picture: RenderableType
            try:
                now = take(stub, address)
                picture = render(last or now, now)
                last = now
            except CommandError as error:
                picture = Text(str(error), "bold red")
            if live:
                live.update(picture, refresh=True)
            else:
                console.print(picture)
                sys.stdout.flush()
            time.sleep(interval)

"""``blink status``: what the engine is doing, as the gateway sees it in the ring."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
from blink.v1 import control_pb2, control_pb2_grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.channel import open_channel
from services.cli.errors import CommandError, from_rpc

CALL_SECONDS = 3.0
RATE_SECONDS = 0.5  # between the two samples that give tokens/s
LABEL_WIDTH = 11
HEALTHY = {control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING}


@dataclass(frozen=True)
class Sample:
    """One answer of GetLoad and when it came, in seconds of a monotonic clock."""

    load: control_pb2.GetLoadResponse
    taken_at: float


def status(address: str, watch: bool, interval: float, as_json: bool) -> None:
    """Run the command. Raises CommandError when the gateway or the engine is not there."""
    with open_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        if watch:
            _watch(stub, address, interval)
            return
        now = take(stub, address)
        if as_json:
            print(_as_json(now.load))
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
    generated = rate(load.generated_tokens, before.load.generated_tokens)
    rows: list[tuple[str, str | Text]] = [
        ("engine", Text(name, "green" if load.engine_state in HEALTHY else "bold red")),
        ("heartbeat", f"{load.heartbeat_age_ms} ms ago"),
        ("requests", f"{load.running_requests} running, {load.waiting_requests} waiting"),
        ("slots", f"{load.free_slots} of {load.total_slots} free"),
        ("KV pages", f"{load.free_kv_pages} of {load.total_kv_pages} free"),
        ("tokens/s", f"{generated} generated, {rate(load.prompt_tokens, before.load.prompt_tokens)} prompt"),
        ("tokens", f"{load.generated_tokens} generated, {load.prompt_tokens} prompt since the engine started"),
        ("steps", f"{load.steps} steps, {load.preemptions} preemptions"),
        ("refused", f"{load.rejected_requests} by the engine, {_overload(load.overload)} by this gateway worker"),
    ]
    if load.overload.no_slot:
        rows.append(("", "more slots: blink up --workers N, or --set bootstrap.slots_per_lane=N"))
    facts = [Text.assemble(label.ljust(LABEL_WIDTH), fact) for label, fact in rows]
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
    return Group(*facts, Text(), lanes)


def _overload(overload: control_pb2.Overload) -> str:
    """How many requests a gateway turned away, and of those for what reason: ``3 (2 no slot, 1 queue full)``."""
    counts = [(field.name.replace("_", " "), getattr(overload, field.name)) for field in overload.DESCRIPTOR.fields]
    causes = ", ".join(f"{count} {name}" for name, count in counts if count)
    return f"{sum(count for _, count in counts)}" + (f" ({causes})" if causes else "")


def _as_json(load: control_pb2.GetLoadResponse) -> str:
    """Every field, in the order of the definition; the library's own puts what is 0 or false last."""
    values = MessageToDict(load, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(_ordered(values, load.DESCRIPTOR), indent=2)


def _ordered(values: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    ordered = {}
    for field in descriptor.fields:
        value = values.get(field.name)
        if isinstance(value, list) and field.message_type is not None:
            value = [_ordered(item, field.message_type) for item in value]
        elif isinstance(value, dict):
            value = _ordered(value, field.message_type)
        if value is not None:
            ordered[field.name] = value
    return ordered


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

"""The addresses where clients are to call: free, or a Blink's that serves there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
from grpc_health.v1 import health_pb2

from services.cli.channel import open_channel
from services.cli.doctor.finding import Finding, missing, ok
from services.cli.doctor.machine import Machine, Purpose
from services.cli.errors import CommandError
from services.cli.top.scrape import read

ASK_SECONDS = 3.0
INFERENCE = "blink.v1.Inference"
_LISTENING = "0A"

Asks = Callable[[str], bool]


def answers_grpc(address: str) -> bool:
    """Whether a gateway of Blink's serves gRPC there: it knows the health of its service, in whatever state."""
    try:
        with open_channel(address) as channel:
            check: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            check(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=ASK_SECONDS)
    except (grpc.RpcError, CommandError):
        return False
    return True


def answers_http(address: str) -> bool:
    """Whether a gateway of Blink's serves HTTP there: its metrics say so, and need no key."""
    for scheme in ("http", "https"):
        try:
            return any(name.startswith("blink_") for name in read(f"{scheme}://{address}").values)
        except CommandError:
            continue
    return False


def check_ports(
    machine: Machine, purpose: Purpose, asks_grpc: Asks = answers_grpc, asks_http: Asks = answers_http
) -> Iterator[Finding]:
    """One finding for each of the two addresses. ``asks_*`` tell whether a Blink answers at one."""
    taken = set(_listening(machine))
    for option, address, asks in (("--listen", purpose.listen, asks_grpc), ("--http", purpose.http, asks_http)):
        yield _check(option, address, taken, asks)


def _check(option: str, address: str, taken: set[int], asks: Asks) -> Finding:
    kind = "gRPC port" if option == "--listen" else "HTTP port"
    if not address:
        return ok(kind, f"not looked at: clients call the gateway's machine; name another with {option}")
    check = f"{kind} {address}"
    port = address.rpartition(":")[2]
    if not port.isdecimal() or port == "0":
        return ok(check, "not a fixed TCP port")
    if int(port) not in taken:
        return ok(check, "free")
    if asks(address):
        return ok(check, "a Blink serves here already")
    advice = f"stop what listens there, or choose another with {option}; for a Blink behind TLS set BLINK_TLS_AUTHORITY"
    return missing(check, "in use, and no Blink answers there", advice)


def _listening(machine: Machine) -> Iterator[int]:
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        for line in machine.read(table).splitlines()[1:]:
            fields = line.split()  # number, local address:port in hexadecimal, remote, state
            if len(fields) > 3 and fields[3] == _LISTENING:
                yield int(fields[1].rpartition(":")[2], 16)

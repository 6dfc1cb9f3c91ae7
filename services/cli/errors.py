"""What a command can fail with: one line for the user."""

from __future__ import annotations

import signal

import grpc

from services.cli.program import API_KEY_VARIABLE, command, tls_hint
from services.common.errors import BlinkError

# Every refusal of a gateway carries its details under this key (docs/protocol.md), so what lacks it is gRPC's own.
DETAILS_KEY = "grpc-status-details-bin"


class CommandError(BlinkError):
    """A command can't do what it was asked to."""


class StoppedError(CommandError):
    """A signal ended the command before its work was done."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # what a shell reports for a process that the signal killed


class GatewayUnreachableError(CommandError):
    """Nothing answers at the address."""

    def __init__(self, address: str, why: str = "") -> None:
        because = f" ({why})" if why else ""
        start = command("up")
        super().__init__(
            f"no gateway answers at {address}{because}: start one with `{start}`, or name another with --address"
            f"{tls_hint()}"
        )


def from_rpc(error: grpc.RpcError, address: str) -> CommandError:
    """A failed call as one line."""
    if not isinstance(error, grpc.Call):
        return CommandError(f"call to {address} failed: {error}")
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CommandError(f"the gateway at {address} did not answer in time")
    if not any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
            return GatewayUnreachableError(address)
        if code is grpc.StatusCode.UNAVAILABLE and "resolv" in details.lower():
            return GatewayUnreachableError(address, "its host name is not known")
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}:
            return CommandError(f"the gateway at {address} broke the connection ({details}): try again")
    hint = f"; this command takes the key from {API_KEY_VARIABLE}" if code is grpc.StatusCode.UNAUTHENTICATED else ""
    return CommandError(f"{code.name}: {details}{hint}")

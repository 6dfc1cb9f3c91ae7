"""What a command can fail with: one line for the user."""

from __future__ import annotations

import grpc

from services.common.errors import BlinkError


class CommandError(BlinkError):
    """A command can't do what it was asked to."""


class GatewayUnreachableError(CommandError):
    """Nothing answers at the address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"no gateway answers at {address}: start one with `blink up`, or name it with --address")


def from_rpc(error: grpc.RpcError, address: str) -> CommandError:
    """A failed call as one line."""
    if not isinstance(error, grpc.Call):
        return CommandError(f"call to {address} failed: {error}")
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
        return GatewayUnreachableError(address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CommandError(f"the gateway at {address} did not answer in time")
    return CommandError(f"{code.name}: {details}")

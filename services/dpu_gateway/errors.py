"""Errors that callers see: each becomes one gRPC status with google.rpc details."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

STATUS_DETAILS_KEY = "grpc-status-details-bin"
# A status travels in HTTP/2 headers, percent-encoded and once more in its details; clients drop the whole status, and
# report another, when that passes 8 KiB.
MAX_TEXT_BYTES = 1024
MAX_QUOTED_BYTES = 128


def clipped(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """``text`` itself, or the beginning of it: at most ``limit`` bytes of UTF-8 and a mark that there was more."""
    data = text.encode(errors="replace")
    return text if len(data) <= limit else data[:limit].decode(errors="ignore") + "…"


class GatewayError(Exception):
    """A request's failure. ``str()`` is what the caller reads: the field, its value and the limit."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, text: str) -> None:
        super().__init__(clipped(text))

    def details(self) -> list[message.Message]:
        """google.rpc messages that let programs act on the error."""
        return []

    def status(self) -> status_pb2.Status:
        packed = []
        for detail in self.details():
            wrapper = any_pb2.Any()
            wrapper.Pack(detail)
            packed.append(wrapper)
        return status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=str(self), details=packed)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((STATUS_DETAILS_KEY, self.status().SerializeToString()),)


class FieldError(GatewayError):
    """A request field that breaks a rule."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}" if field else problem)
        self.field = field
        self.problem = clipped(problem)

    def details(self) -> list[message.Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.problem)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class UnauthenticatedError(GatewayError):
    """No API key, or one that is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ModelNotFoundError(GatewayError):
    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model {clipped(asked, MAX_QUOTED_BYTES)!r} is not served here; {served!r} is")


class RetryableError(GatewayError):
    """The same request may succeed after ``retry_after`` seconds."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after

    def details(self) -> list[message.Message]:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(self.retry_after * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class Overload(StrEnum):
    """What there was too little of; the names are fields of blink.v1.Overload."""

    NO_SLOT = "no_slot"
    ARENA_FULL = "arena_full"
    QUEUE_FULL = "queue_full"
    SLOW_READER = "slow_reader"
    RATE_LIMIT = "rate_limit"
    CONCURRENCY_LIMIT = "concurrency_limit"
    TOKEN_RATE_LIMIT = "token_rate_limit"  # noqa: S105 (no password)
    SHED = "shed"


class OverloadedError(RetryableError):
    """No room for one more request, or its stream is read too slowly."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, cause: Overload, text: str, retry_after: float) -> None:
        super().__init__(text, retry_after)
        self.cause = cause


class UnavailableError(RetryableError):
    """The engine or this gateway is starting, stopping or gone."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineRejectedError(GatewayError):
    """The engine refused what this gateway had validated: a fault of ours, never the caller's."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine rejected the request: {reason}")

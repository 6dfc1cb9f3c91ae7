"""Errors that callers see: each becomes one gRPC status with google.rpc details."""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

STATUS_DETAILS_KEY = "grpc-status-details-bin"


class GatewayError(Exception):
    """A request's failure. ``str()`` is what the caller reads: the field, its value and the limit."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

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
        self.problem = problem

    def details(self) -> list[message.Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.problem)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class ModelNotFoundError(GatewayError):
    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model {asked!r} is not served here; {served!r} is")


class RetryableError(GatewayError):
    """The same request may succeed after ``retry_after`` seconds."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after

    def details(self) -> list[message.Message]:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(self.retry_after * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class OverloadedError(RetryableError):
    """No room for one more request, or its stream is read too slowly."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(RetryableError):
    """The engine or this gateway is starting, stopping or gone."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineRejectedError(GatewayError):
    """The engine refused what this gateway had validated: a fault of ours, never the caller's."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine rejected the request: {reason}")

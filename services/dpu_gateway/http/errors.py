"""Failures in the shape that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import grpc
from pydantic_core import to_json
from starlette.responses import Response

from services.dpu_gateway.access.callers import Caller
from services.dpu_gateway.errors import (
    FieldError,
    GatewayError,
    ModelNotFoundError,
    OverloadedError,
    RetryableError,
    UnauthenticatedError,
)

STATUS_OF = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}
# The API's fields (inference.proto) under the names that OpenAI's requests give them; the longest prefix counts.
PARAMETERS = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "stop.": "",
    "sampling.": "",
}


class HttpError(Exception):
    """A refusal on the way to a request: ``message`` is what the caller reads."""

    TYPES: ClassVar[Mapping[int, str]] = {
        429: "rate_limit_error",
        500: "server_error",
        503: "service_unavailable_error",
    }

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = self.TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(to_json(self.body()), self.status, self.headers, "application/json")


def from_gateway(error: GatewayError) -> HttpError:
    """The same failure as gRPC's callers get, with OpenAI's names."""
    status = STATUS_OF.get(error.code, 500)
    if isinstance(error, FieldError):
        param = parameter(error.field)
        return HttpError(status, f"{param} {error.problem}", param)
    code = "invalid_api_key" if isinstance(error, UnauthenticatedError) else None
    headers = {"www-authenticate": "Bearer"} if code else {}
    if isinstance(error, OverloadedError):
        code = error.cause.value
    elif isinstance(error, ModelNotFoundError):
        code = "model_not_found"
    if isinstance(error, RetryableError):
        headers = retry_headers(error.retry_after)
    return HttpError(status, str(error), "model" if code == "model_not_found" else None, code, headers)


def retry_headers(seconds: float) -> dict[str, str]:
    """Whole seconds as the standard has it, and the milliseconds that OpenAI's clients prefer."""
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def rate_headers(caller: Caller) -> dict[str, str]:
    """What is left of the caller's rates, under the names that OpenAI's clients know."""
    headers = {}
    for what, allowance in caller.allowances().items():
        headers[f"x-ratelimit-limit-{what}"] = f"{allowance.per_minute:.0f}"
        headers[f"x-ratelimit-remaining-{what}"] = str(allowance.remaining)
        headers[f"x-ratelimit-reset-{what}"] = f"{max(0.0, allowance.full_after):.3f}s"
    return headers


def parameter(name: str) -> str:
    """What OpenAI's API calls a field of blink.v1."""
    prefixes = [prefix for prefix in PARAMETERS if name.startswith(prefix)]
    if not prefixes:
        return name
    longest = max(prefixes, key=len)
    return PARAMETERS[longest] + name[len(longest) :]

"""How client commands reach a gateway: in plain text, or as the environment says with TLS and an API key."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from services.cli.errors import CommandError
from services.cli.program import API_KEY_VARIABLE, AUTHORITY_VARIABLE

CERTIFICATE_VARIABLE = "BLINK_TLS_CERTIFICATE"
KEY_VARIABLE = "BLINK_TLS_KEY"


def open_channel(address: str) -> grpc.Channel:
    """A channel to ``address``, with TLS when an authority is named. Raises CommandError for a file that is missing."""
    credentials = _credentials()
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    api_key = os.environ.get(API_KEY_VARIABLE)
    return grpc.intercept_channel(channel, _WithKey(api_key)) if api_key else channel


def open_aio_channel(address: str) -> grpc.aio.Channel:
    """The same for asyncio, with a connection of its own; calls carry ``with_key`` themselves. Raises CommandError."""
    credentials, options = _credentials(), [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def with_key(key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that shows an API key; none without one."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def _credentials() -> grpc.ChannelCredentials | None:
    authority, certificate, key = (
        _read(variable) for variable in (AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)
    )
    if (certificate is None) is not (key is None):
        raise CommandError(f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} go together, one of them is not set")
    check_authority()
    return None if authority is None else grpc.ssl_channel_credentials(authority, key, certificate)


def check_authority() -> None:
    """Raises CommandError for a file without certificates, which gRPC would only say nothing answers of."""
    path = os.environ.get(AUTHORITY_VARIABLE)
    try:
        if path:
            ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise CommandError(
            f"{AUTHORITY_VARIABLE} is {path}: it holds no certificates in PEM ({error.reason})"
        ) from error
    except OSError as error:
        raise CommandError(f"{AUTHORITY_VARIABLE} is {path}: {error.strerror}") from error


def _read(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"{variable} is {path}: {error.strerror}") from error


class _Details(NamedTuple):
    """A call's details with more metadata; gRPC's own class has no constructor of ours."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _WithKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends the key with every call: gRPC's call credentials would refuse to go over a connection without TLS."""

    def __init__(self, key: str) -> None:
        self._metadata = with_key(key)

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, details: Any) -> _Details:
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), *self._metadata],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

"""Asks the server what it serves before any load, so that a wrong address is one clear line."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import grpc
import requests
from blink.v1 import control_pb2, control_pb2_grpc

from services.cli.address import require_target
from services.cli.bench.kinds import Protocol
from services.cli.bench.target import Target
from services.cli.channel import open_channel
from services.cli.errors import CommandError, from_rpc
from services.cli.program import API_KEY_VARIABLE

SECONDS = 10.0
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"


def resolve_grpc(address: str, **asking: Any) -> Target:
    """Blink by gRPC; ``asking``: Target's fields of requests. Raises CommandError."""
    with open_channel(require_target(address)) as channel:
        try:
            info = control_pb2_grpc.ControlStub(channel).GetModelInfo(
                control_pb2.GetModelInfoRequest(), timeout=SECONDS
            )
        except grpc.RpcError as error:
            raise from_rpc(error, address) from error
    key = os.environ.get(API_KEY_VARIABLE, "")
    return Target(Protocol.GRPC, address, info.name, vocabulary=info.vocabulary_size, api_key=key, **asking)


def resolve_openai(url: str, protocol: Protocol, model: str | None, vocabulary: int, **asking: Any) -> Target:
    """Any server with OpenAI's API at ``url``. Raises CommandError."""
    try:
        import aiohttp  # noqa: F401, PLC0415 - an optional extra, needed by openai_client
    except ImportError as error:
        raise CommandError("--openai needs aiohttp: pip install '.[bench]' in Blink's checkout") from error
    if urlsplit(url).scheme not in {"http", "https"}:
        raise CommandError(f"--openai is {url!r}, must be a base URL such as http://127.0.0.1:8000/v1")
    base = url.rstrip("/")
    key = os.environ.get(OPENAI_KEY_VARIABLE) or os.environ.get(API_KEY_VARIABLE, "")
    served = model or _first_model(base, key)
    return Target(protocol, base, served, vocabulary=vocabulary, api_key=key, **asking)


def _first_model(base: str, key: str) -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = requests.get(f"{base}/models", headers=headers, timeout=SECONDS)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except requests.exceptions.SSLError as error:
        advice = "set REQUESTS_CA_BUNDLE and SSL_CERT_FILE to the authority of its certificate"
        raise CommandError(f"TLS with {base} failed: {advice} ({error})") from error
    except requests.ConnectionError as error:
        raise CommandError(f"no server answers at {base}: start one, or name another with --openai") from error
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        raise CommandError(f"{base}/models does not say what is served ({error}): name it with --model") from error

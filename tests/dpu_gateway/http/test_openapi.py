"""The OpenAPI document is true: what schemathesis makes of it is answered as it says, and never with a fault."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.dpu_gateway.http.openapi import openapi_json
from services.dpu_gateway.http.schema import ChatCompletionBody, CompletionBody, GenerationBody
from tests.dpu_gateway.fuzzing import LONG, open_files
from tests.dpu_gateway.harness import MODEL, Gateway, gateway, ring_info, until
from tests.dpu_gateway.http.clients import http_client
from tests.support.stand_in_engine import Behaviour

SLOTS = 64
INFO = replace(ring_info(slots_per_lane=SLOTS), max_context_tokens=96)
ANY_PORT = "127.0.0.1:0"
# Its document can't say all: sums over fields, the model's vocabulary, its context. Such refusals are no fault.
SCHEMATHESIS = [
    *("--phases=coverage,fuzzing", "--exclude-checks=positive_data_acceptance", "--request-timeout=20", "--no-color"),
    *([f"--max-examples={LONG}"] if LONG else ["--max-examples=30", "--generation-deterministic"]),
]


def document(model: str | None = MODEL) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(openapi_json(model))
    return loaded


async def schemathesis(system: Gateway, directory: Path, *flags: str) -> str:
    """What it prints of one run; the exit code tells whether it found anything."""
    url = f"http://127.0.0.1:{system.workers[0].http_port}/openapi.json"
    program = [sys.executable, "-m", "schemathesis.cli", "run", url, *SCHEMATHESIS, *flags]
    process = await asyncio.create_subprocess_exec(
        *program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=directory
    )
    output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text[-8000:]
    return text


@pytest.mark.timeout(3600 if LONG else 120)
async def test_everything_that_the_document_allows_and_forbids_is_answered_as_it_says(tmp_path: Path) -> None:
    async with gateway(
        Behaviour(burst=64), INFO, listen=ANY_PORT, http_listen=ANY_PORT, heartbeat_timeout=60
    ) as system:
        before = open_files()
        text = await schemathesis(system, tmp_path)
        assert "Operations:       7 selected / 7 total" in text
        worker = system.workers[0]
        await until(lambda: worker.generations.open_streams == 0 and system.session.free_slots == SLOTS)
        assert system.session.free_arena_bytes == system.session.geometry.arena_bytes
        await until(lambda: open_files() <= before)  # connections end when their client has


async def test_the_document_tells_the_models_that_parse_requests() -> None:
    schemas = document()["components"]["schemas"]
    bodies: tuple[type[GenerationBody], ...] = (CompletionBody, ChatCompletionBody)
    for body in bodies:
        schema = schemas[body.__name__]
        assert set(schema["properties"]) == set(body.model_fields) | set(body.unsupported)
        assert schema["additionalProperties"] is False
        required = {name for name, field in body.model_fields.items() if field.is_required()}
        assert set(schema["required"]) == required
        assert schema["properties"]["model"]["enum"] == [MODEL]
    assert "enum" not in document(None)["components"]["schemas"]["CompletionBody"]["properties"]["model"]


async def test_it_is_served_to_everybody_and_names_every_route(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("")
    async with gateway(api_keys=tmp_path / "keys.toml") as system, http_client(system) as client:
        response = await client.get("/openapi.json")
        assert response.status_code == 200
        assert response.json() == document()
        for path, methods in response.json()["paths"].items():
            for method in methods:
                answer = await client.request(method, path.replace("{name}", MODEL))
                assert answer.status_code in {200, 401}, path


def boundaries(schema: dict[str, Any]) -> list[tuple[Any, bool]]:
    """Numbers at the edges of a range, and whether they lie in it."""
    found = []
    for low, inside in (("minimum", True), ("exclusiveMinimum", False)):
        if low in schema:
            found += [(schema[low], inside), (schema[low] - 1, False)]
    if "maximum" in schema:
        found += [(schema["maximum"], True), (schema["maximum"] + 1, False)]
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "priority"),
        "logprobs",
    ],
)
async def test_ranges_in_the_document_are_those_that_hold(name: str) -> None:
    schema = document()["components"]["schemas"]["CompletionBody"]["properties"][name]
    edges = boundaries(schema)
    assert len(edges) >= 4 or name == "logprobs"
    async with gateway() as system, http_client(system) as client:
        for value, fits in edges:
            body = {"model": MODEL, "prompt": "abc", "max_tokens": 1, name: value}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == (200 if fits else 400), (value, answer.text)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {})])
async def test_values_are_idle_only_in_their_own_type(path: str, body: dict[str, Any]) -> None:
    """True equals 1 in Python, not in JSON."""
    wrong = {"best_of": True} if path == "/v1/completions" else {"store": 0}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **body, **wrong}
    if path == "/v1/completions":
        del body["messages"]
    async with gateway() as system, http_client(system) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(wrong))

"""The gateway as a DPU's Arm cores run it, emulated: it attaches to an engine of this machine and serves the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from blink.v1 import inference_pb2, inference_pb2_grpc

from services.common.runtime import ring_path
from tests.aarch64.machine import Image, Installed, Userland

pytestmark = pytest.mark.skipif(
    "BLINK_AARCH64" not in os.environ, reason="emulates another processor: make test-aarch64"
)

GOLDEN = json.loads((Path(__file__).parents[1] / "gpu_engine/cpu/goldens.json").read_text())["goldens"][0]
TOKENS = 8
START_SECONDS = 300


def until_event(process: subprocess.Popen[str], name: str) -> dict[str, object]:
    """Read what the process says up to an event of this name, and go on reading it in a thread."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if f'"event": "{name}"' in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            event: dict[str, object] = json.loads(line)
            return event
    raise AssertionError(f"no {name} in {''.join(seen)}")


@pytest.fixture(params=["packages", "image"])
def userland(request: pytest.FixtureRequest) -> Userland:
    """Debian's packages and wheels as a DPU would install them, and the gateway's image for it."""
    if request.param == "packages":
        return Installed()
    if os.geteuid() != 0:
        pytest.skip("images are built as root")
    return Image()


@pytest.fixture
def address(tmp_path: Path, userland: Userland) -> Iterator[str]:
    instance = f"arm-{uuid.uuid4().hex[:8]}"
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    engine = subprocess.Popen(
        [sys.executable, "-m", "services.bootstrap", "--log-format=json", f"--instance={instance}", "--kv-tokens=2048"],
        env={**os.environ, "BLINK_RUNTIME_DIR": str(runtime)},
        stderr=subprocess.PIPE,
        text=True,
    )
    flags = ("--log-format=json", f"--instance={instance}", "--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")
    gateway = userland.python("-m", "services.dpu_gateway", *flags, BLINK_RUNTIME_DIR=str(runtime))
    try:
        until_event(engine, "ready")
        port = until_event(gateway, "listening")["port"]
        yield f"127.0.0.1:{port}"
    finally:
        for process in (gateway, engine):
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        ring_path(instance).unlink(missing_ok=True)


@pytest.mark.timeout(2700)
def test_an_aarch64_gateway_serves_the_models_tokens_from_an_engine_of_this_machine(address: str) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=GOLDEN["prompt"]),
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=TOKENS, ignore_eos=True),
    )
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert _answer(stub, request) == GOLDEN["tokens"][:TOKENS]


def _answer(stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest) -> list[int]:
    """The ids; asks again, as a client should, while the gateway has found no engine yet."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return [index for event in stub.Generate(request, timeout=START_SECONDS) for index in event.chunk.token_ids]
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.2)

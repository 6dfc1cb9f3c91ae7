"""Blink's two sides as an operator starts them on two machines: the engine on rxe_host, a gateway on rxe_dpu."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from blink.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tests.support.certificates import Authority

HOST_ADDRESS = "10.77.0.2:7000"
API_ADDRESS = "10.77.0.1:50051"
TIME_LIMIT = 240.0  # seconds that anything may take on slow processors
SETTLED_SECONDS = 6.0  # retries over a link that is down end after 2
_LINK_EVENTS = {"attached", "engine_unavailable"}
TOKENS_IN_ENGINE = 1024


class Side:
    """One process; its log events as they come."""

    def __init__(self, module: str, *flags: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--log-format=json", *flags], stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                try:
                    self.events.append(json.loads(line))
                except json.JSONDecodeError:
                    self.events.append({"event": line.rstrip()})

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th event of this name."""
        deadline = time.monotonic() + TIME_LIMIT
        while True:
            found = [event for event in list(self.events) if event["event"] == name]
            if len(found) >= count:
                return found[count - 1]
            assert self.process.poll() is None, self.events[-5:]
            assert time.monotonic() < deadline, (name, self.events[-5:])
            time.sleep(0.02)

    def count(self, name: str) -> int:
        return sum(event["event"] == name for event in list(self.events))

    def wait_until_settled(self) -> None:
        """Attached, and not lost again within the time in which a loss shows: an attachment may have begun on a link
        that was down again before it ended."""
        deadline = time.monotonic() + TIME_LIMIT
        changes, since = 0, time.monotonic()
        while True:
            found = [event["event"] for event in list(self.events) if event["event"] in _LINK_EVENTS]
            if len(found) != changes:
                changes, since = len(found), time.monotonic()
            if found[-1:] == ["attached"] and time.monotonic() - since > SETTLED_SECONDS:
                return
            assert time.monotonic() < deadline, self.events[-5:]
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


class Deployment:
    """Both sides, over TLS with certificates of their own; ``model`` is a GGUF file."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._model = model
        authority = Authority(directory)
        self._tls = {
            name: (
                f"--handshake-certificate={files.certificate}",
                f"--handshake-key={files.key}",
                f"--handshake-authority={files.authority}",
            )
            for name, files in (("host", authority.issue("10.77.0.2")), ("dpu", authority.issue("dpu-a")))
        }
        self.engine = self.start_engine()
        self.gateway = self.start_gateway()

    def start_engine(self) -> Side:
        self.engine = Side(
            "services.bootstrap",
            f"--model={self._model}",
            f"--listen={HOST_ADDRESS}",
            *("--transport=verbs", "--rdma-device=rxe_host", *self._tls["host"]),
            *("--lanes=2", "--slots-per-lane=8", f"--kv-tokens={TOKENS_IN_ENGINE}", "--max-batched-tokens=16"),
            *("--lease-timeout-ms=15000", "--max-running=8", "--threads=2"),
        )
        return self.engine

    def start_gateway(self) -> Side:
        self.gateway = Side(
            "services.dpu_gateway",
            f"--bootstrap={HOST_ADDRESS}",
            f"--listen={API_ADDRESS}",
            *("--transport=verbs", "--rdma-device=rxe_dpu", *self._tls["dpu"]),
            # Processors of the emulated machine are slow: what takes milliseconds elsewhere takes a second.
            *("--heartbeat-timeout=20", "--progress-timeout=300", "--attach-timeout=20"),
            *("--poll-fast-us=5000", "--poll-slow-us=20000"),
        )
        return self.gateway

    def show(self) -> None:
        """What both sides said, for whoever reads a failed test's output."""
        for side in (self.engine, self.gateway):
            for event in side.events:
                print({name: value for name, value in event.items() if name not in {"level", "pid"}})

    def stop(self) -> None:
        self.gateway.kill()
        self.engine.kill()

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(API_ADDRESS, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield channel

    def load(self) -> control_pb2.GetLoadResponse:
        with self.channel() as channel:
            return control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=TIME_LIMIT)


class Stream:
    """One greedy Generate call, read by a thread: ids, and how and when it ended."""

    def __init__(self, channel: grpc.Channel, prompt: list[int], max_tokens: int) -> None:
        self.ids: list[int] = []
        self.finished = False
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.ended_at = 0.0
        self._changed = threading.Condition()
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stop=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        self._call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=TIME_LIMIT)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._call:
                with self._changed:
                    self.ids += event.chunk.token_ids
                    self.finished = event.WhichOneof("event") == "finished"
                    self._changed.notify_all()
        except grpc.RpcError:
            self.code, self.details = self._call.code(), self._call.details()
        with self._changed:
            self.ended_at = time.monotonic()
            self._changed.notify_all()

    def wait_for_token(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.ids or self.ended_at, TIME_LIMIT)
        assert self.ids, (self.code, self.details)

    def join(self) -> Stream:
        self._thread.join(TIME_LIMIT)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

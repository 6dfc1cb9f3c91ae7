"""The whole product as its user starts it: ``blink up`` in a process, real clients, nothing simulated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import grpc
import psutil
from blink.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from services.common.runtime import ring_path
from tests.cli.run_blink import BLINK, blink

LIMIT = 90.0  # seconds that anything may take on a busy machine before a test gives up


class Product:
    """One ``blink up`` with an instance name, a runtime directory and a port of its own."""

    def __init__(self, directory: Path, *flags: str, instance: str | None = None) -> None:
        self.instance = instance or f"e2e-{uuid.uuid4().hex[:10]}"
        self.directory = directory
        self.environment = {"BLINK_RUNTIME_DIR": str(directory)}
        self.lines: list[str] = []
        self.output: list[str] = []
        free_ports = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        command = [*BLINK, "up", "--instance", self.instance, *free_ports, "--verbose", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment, "COLUMNS": "400"},
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines))
            for stream, lines in ((self.process.stderr, self.lines), (self.process.stdout, self.output))
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines += [line.rstrip("\n")]  # as they come, for whoever waits

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """The ``count``-th line of stderr that matches."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        until(lambda: len(found()) >= count or self.process.poll() is not None, lambda: "\n".join(self.lines))
        matches = found()
        assert len(matches) >= count, "\n".join(self.lines)
        return matches[count - 1]

    @property
    def address(self) -> str:
        """Where it serves; waits until it does."""
        return self.wait_for(r"serving .* at (\S+) ")[1]

    @property
    def http(self) -> str:
        """Base URL of its HTTP API; waits until it serves."""
        return self.wait_for(r"OpenAI API at (\S+)/v1")[1]

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A connection of its own, not one shared with other channels of this process."""
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield channel

    def child(self, module: str, *words: str) -> psutil.Process:
        """The child process that runs a module with these words on its command line."""
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            if module in command and all(word in command for word in words):
                return child
        raise AssertionError(f"no child runs {module} {words}")

    @property
    def bootstrap(self) -> psutil.Process:
        return self.child("services.bootstrap")

    def gateway(self, worker: int) -> psutil.Process:
        return self.child("services.dpu_gateway", f"--worker={worker}")

    def blink(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another ``blink`` command, talking to this product."""
        return blink(command, *arguments, "--address", self.address, environment=self.environment)

    def load(self) -> control_pb2.GetLoadResponse:
        with self.channel() as channel:
            return control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=LIMIT)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ask it to stop; the exit code."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(LIMIT)
        for reader in self._readers:
            reader.join()
        return code

    def left_behind(self) -> list[str]:
        """Files and processes that should not be there once it has ended."""
        files = [str(path) for path in (ring_path(self.instance), *self.directory.iterdir()) if path.exists()]
        return files + [f"process {process.pid}" for process in self.processes()]

    def processes(self) -> list[psutil.Process]:
        """Every process of this instance but ``blink up`` itself, whoever its parent is now."""
        found = []
        for process in psutil.process_iter(["cmdline", "pid"]):
            command = process.info["cmdline"] or []
            if f"--instance={self.instance}" in command:
                found.append(process)
        return found

    def destroy(self) -> None:
        """Whatever happened: nothing of it survives the test."""
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        for process in self.processes():
            process.kill()
        self.end()
        ring_path(self.instance).unlink(missing_ok=True)


def until(condition: Callable[[], bool], describe: Callable[[], str] = lambda: "") -> None:
    """Return once ``condition`` holds; fails when it does not come to hold."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)


def request(prompt: str, max_tokens: int, **fields: object) -> inference_pb2.GenerateRequest:
    """Greedy, from plain text, exactly ``max_tokens`` long."""
    return inference_pb2.GenerateRequest(
        text=prompt,
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


class Stream:
    """One Generate call, read by a thread; its events, its status, and when it ended."""

    def __init__(self, channel: grpc.Channel, message: inference_pb2.GenerateRequest) -> None:
        self.events: list[inference_pb2.GenerateResponse] = []
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.ended_at = 0.0
        self.call = inference_pb2_grpc.InferenceStub(channel).Generate(message)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self.call:
                self.events.append(event)
        except grpc.RpcError:
            self.code, self.details = self.call.code(), self.call.details()
        self.ended_at = time.monotonic()

    def join(self) -> Stream:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

    def wait_for_tokens(self, count: int = 1) -> None:
        until(lambda: len(self.ids) >= count or not self._thread.is_alive())
        assert len(self.ids) >= count, (self.code, self.details)

    @property
    def ids(self) -> list[int]:
        return [index for event in list(self.events) for index in event.chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.chunk.text + event.finished.text for event in self.events)

    @property
    def reason(self) -> str:
        """How the stream finished; fails when it was cut short."""
        assert self.code is grpc.StatusCode.OK, (self.code, self.details)
        assert self.events[-1].WhichOneof("event") == "finished"
        return inference_pb2.FinishReason.Name(self.events[-1].finished.reason).removeprefix("FINISH_REASON_")


def statuses(product: Product) -> Mapping[int, control_pb2.LaneLoad]:
    """Lanes by number."""
    return {lane.lane: lane for lane in product.load().lanes}

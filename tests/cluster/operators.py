"""The operator's process, started and killed by tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import requests

from tests.cluster.control_plane import free_ports

START_SECONDS = 60.0


class Operator:
    """One replica, with ``settings`` beside those that make it quick. Start it as a context."""

    def __init__(self, kubeconfig: Path, directory: Path, identity: str = "one", **settings: str) -> None:
        self.metrics_port, self.health_port = free_ports(2)
        self._log = directory / f"operator-{identity}.log"
        self._kubeconfig = kubeconfig
        self._identity = identity
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Operator:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        flags = {
            "identity": self._identity,
            "namespace": "serving",
            "lease": "blink-operator",
            "lease-seconds": 5,
            "interval": 0.5,
            "settle": 0.05,
            "priority-class": "blink-tenants",
            "metrics-port": self.metrics_port,
            "health-port": self.health_port,
            "log-format": "json",
            **{name.replace("_", "-"): value for name, value in self._settings.items()},
        }
        command = [sys.executable, "-m", "services.colocation", *(f"--{name}={value}" for name, value in flags.items())]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + START_SECONDS
        while not self.alive():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.1)

    def alive(self) -> bool:
        """What its liveness probe sees."""
        try:
            return requests.get(f"http://127.0.0.1:{self.health_port}/healthz", timeout=5).ok
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """At once, in the midst of whatever it does."""
        self._end(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Without waiting for what it does."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = requests.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))
        )

    def log(self) -> str:
        return self._log.read_text()[-6000:]

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

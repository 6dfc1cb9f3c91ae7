"""``blink up``: a whole Blink on this machine, from one command."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType

from rich.console import Console

from services.bootstrap.settings import BootstrapSettings
from services.bootstrap.store import KNOWN_MODELS, ModelStore
from services.cli.address import reserve
from services.cli.channel import CERTIFICATE_VARIABLE, KEY_VARIABLE
from services.cli.children import Child, Event
from services.cli.errors import CommandError, StoppedError
from services.cli.generate import TextStream
from services.cli.leftovers import remove_leftovers, require_free
from services.cli.model import fetch
from services.cli.program import API_KEY_VARIABLE, AUTHORITY_VARIABLE
from services.cli.report import Report
from services.cli.supervisor import Supervisor
from services.common.runtime import runtime_directory, status_path
from services.dpu_gateway.access.limits import limits_path
from services.dpu_gateway.metrics.sharing import SharedFigures
from services.dpu_gateway.peers import socket_path
from services.dpu_gateway.settings import GatewaySettings

SAMPLE_TOKENS = 256
# What the processes are told so that they find each other and speak to this one.
OWN_SETTINGS = {
    "bootstrap": frozenset({"log_format"}),
    "gateway": frozenset({"log_format", "instance", "worker", "bootstrap"}),
}
STOP_MARGIN_SECONDS = 10.0  # what a process may take to end beyond its own drain limit


@dataclass(frozen=True)
class UpOptions:
    """The command's options; ``settings`` are ``process.name=value`` for what has no option of its own."""

    model: str | None
    engine: str | None
    instance: str | None
    listen: str | None
    http: str | None
    workers: int
    sample: str | None
    verbose: bool
    settings: Sequence[str]


def up(options: UpOptions) -> None:
    """Run the command until Ctrl-C or SIGTERM. Raises BlinkError."""
    flags = _process_flags(options)
    bootstrap_settings = BootstrapSettings.load(flags["bootstrap"])
    gateway_settings = GatewaySettings.load(flags["gateway"])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    require_free(bootstrap_settings.ring_path, bootstrap_settings.instance)
    _ensure_model(bootstrap_settings.model, console)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with (
        reserve(gateway_settings.listen, options.workers) as listen,
        _reserve_http(gateway_settings, options.workers) as http_listen,
        Report(console, options.verbose) as report,
    ):
        bootstrap = Child("bootstrap", "services.bootstrap", flags["bootstrap"], events)
        meeting = [f"--instance={bootstrap_settings.instance}", f"--bootstrap={bootstrap_settings.address}"]
        gateway_flags = [*flags["gateway"], *meeting, f"--listen={listen}", f"--http-listen={http_listen}"]
        gateways = [
            Child(f"gateway-{worker}", "services.dpu_gateway", [*gateway_flags, f"--worker={worker}"], events)
            for worker in range(options.workers)
        ]
        supervisor = Supervisor(bootstrap, gateways, events, report.show, report.say)
        received: list[int] = []

        def on_signal(number: int, _: FrameType | None) -> None:
            received.append(number)
            supervisor.request_stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        sample = _Sample(listen, options.sample, report.say) if options.sample else None
        started = time.monotonic()

        def on_serving() -> None:
            seconds, needs = time.monotonic() - started, _variables_of_callers(gateway_settings)
            report.started(bootstrap_settings.model, listen, options.workers, seconds, needs)
            if gateway_settings.serves_http:
                report.serving_http(http_listen, tls=gateway_settings.tls_certificate is not None)
            if sample:
                sample.start()

        try:
            supervisor.run(on_serving)
            report.stopping()
        finally:
            if sample:
                sample.close()
            limit = max(gateway_settings.drain_limit, bootstrap_settings.drain_seconds) + STOP_MARGIN_SECONDS
            supervisor.stop(limit)
            if bootstrap.was_ready:
                directory, instance = runtime_directory(), bootstrap_settings.instance
                files = [socket_path(directory, instance, worker) for worker in range(options.workers)]
                files += [limits_path(directory, instance), status_path(instance)]
                figures = SharedFigures.directory(directory, instance)
                remove_leftovers(bootstrap_settings.ring_path, bootstrap_settings.address, files, figures)
    if sample and sample.error:
        raise sample.error
    if not supervisor.served:
        raise StoppedError("stopped before it served", received[0])
    if supervisor.killed:
        raise StoppedError("stopped by force: what was running was cut off", received[-1])
    report.say("stopped")


def _process_flags(options: UpOptions) -> dict[str, list[str]]:
    """Command lines of the two kinds of processes; whatever is not given stays to environment and file."""
    flags: dict[str, list[str]] = {"bootstrap": [], "gateway": []}
    for name in ("model", "engine", "instance"):
        value = getattr(options, name)
        if value is not None:
            flags["bootstrap"].append(f"--{name}={value}")
    if options.listen is not None:
        flags["gateway"].append(f"--listen={options.listen}")
    if options.http is not None:
        flags["gateway"].append(f"--http-listen={options.http}")
    for setting in options.settings:
        process, dot, assignment = setting.partition(".")
        name, equals, value = assignment.partition("=")
        if process not in flags or not dot or not equals:
            raise CommandError(f"--set {setting!r} must look like bootstrap.NAME=VALUE or gateway.NAME=VALUE")
        if name.replace("-", "_") in OWN_SETTINGS[process]:
            raise CommandError(f"--set {setting!r}: `blink up` chooses {process}'s {name} itself")
        flags[process].append(f"--{name.replace('_', '-')}={value}")
    lanes = BootstrapSettings.load(flags["bootstrap"]).lanes
    if lanes < options.workers:
        raise CommandError(f"--workers is {options.workers}, but bootstrap has {lanes} lanes: --set bootstrap.lanes=N")
    return flags


def _variables_of_callers(settings: GatewaySettings) -> list[str]:
    """What `generate` and `status` need in their environment to get in (docs/security.md)."""
    asked = {
        AUTHORITY_VARIABLE: settings.tls_certificate,
        CERTIFICATE_VARIABLE: settings.tls_client_authority,
        KEY_VARIABLE: settings.tls_client_authority,
        API_KEY_VARIABLE: settings.api_keys,
    }
    return [variable for variable, setting in asked.items() if setting is not None]


def _reserve_http(settings: GatewaySettings, workers: int) -> AbstractContextManager[str]:
    if not settings.serves_http:
        return nullcontext(settings.http_listen)
    return reserve(settings.http_listen, workers, "--http")


def _ensure_model(name: str, console: Console) -> None:
    """Fetch a known model that is not here yet; refuse what is no model before anything is started."""
    store = ModelStore()
    model = KNOWN_MODELS.get(name)
    if model is not None and not store.has(model):
        fetch(name, console)
    store.resolve(name)


class _Sample:
    """Streams one answer to stdout from a thread, through the same door as any client."""

    def __init__(self, address: str, prompt: str, say: Callable[[str], None]) -> None:
        self.error: CommandError | None = None
        self._address = address
        self._prompt = prompt
        self._say = say
        self._stream: TextStream | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sample", daemon=True)

    def start(self) -> None:
        self._stream = TextStream(self._address, self._prompt, SAMPLE_TOKENS)
        self._thread.start()

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()
            self._thread.join()

    def _run(self) -> None:
        assert self._stream is not None

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        try:
            write(f"\n> {self._prompt}\n\n")
            self._stream.run(write)
            write("\n\n")
        except CommandError as error:
            if not self._closed:
                self.error = error
                self._say(f"the sample failed: {error}")

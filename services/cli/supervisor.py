"""Keeps one Blink running: bootstrap first, then the gateways; what ends is started again; all stops in reverse."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Sequence

from services.cli.children import Child, Event, describe_exit
from services.cli.errors import CommandError

STOP = "stop"
FORCED_SECONDS = 10.0  # for the kernel to end a killed process


class Supervisor:
    """Runs in the main thread and sleeps until a child says something, a restart is due or a signal comes.

    Args:
        bootstrap, gateways: the children, not started yet.
        events: where the children report; signal handlers add STOP events.
        show: called with every event that the operator may want to see.
        say: called with one line for the operator.
    """

    def __init__(
        self,
        bootstrap: Child,
        gateways: Sequence[Child],
        events: queue.SimpleQueue[Event],
        show: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        self._bootstrap = bootstrap
        self._gateways = gateways
        self._events = events
        self._show = show
        self._say = say
        self._due: dict[Child, float] = {}  # when to start a child again
        self._stops = 0
        self._serving = False
        self._killed = False

    @property
    def served(self) -> bool:
        """Whether every gateway came to serve."""
        return self._serving

    @property
    def killed(self) -> bool:
        """Whether a stop did not wait for all to end by themselves."""
        return self._killed

    def request_stop(self) -> None:
        """Stop as soon as possible; asked again, at once. Safe to call from a signal handler."""
        self._events.put(Event(self._bootstrap, STOP))

    def run(self, on_serving: Callable[[], None]) -> None:
        """Start everything, call ``on_serving`` once every gateway serves, and go on until told to stop.

        Raises:
            CommandError: a process could not start; the others are stopped then.
        """
        self._bootstrap.start()
        while not self._stops:
            event = self._next_event()
            if event is not None:
                self._handle(event)
                self._follow_start(on_serving)

    def stop(self, drain_seconds: float) -> None:
        """Gateways drain first, then the engine; whoever takes longer than ``drain_seconds`` is killed."""
        self._due.clear()
        self._stops = min(self._stops, 1)  # only what is asked from now on hurries
        for group in (self._gateways, (self._bootstrap,)):
            if self._stops <= 1:
                self._signal_and_wait(group, signal.SIGTERM, drain_seconds)
            if late := [child for child in group if child.alive]:
                self._killed = True
                self._say("killing " + ", ".join(child.name for child in late))
                self._signal_and_wait(late, signal.SIGKILL, FORCED_SECONDS)

    def _next_event(self) -> Event | None:
        """The next event; None when the time for a restart has come, which is then done."""
        if not self._due:
            return self._events.get()
        child, due = min(self._due.items(), key=lambda item: item[1])
        try:
            return self._events.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            del self._due[child]
            child.start()
            return None

    def _handle(self, event: Event) -> None:
        child = event.child
        if event.name == STOP:
            self._stops += 1
        elif event.exit_code is not None:
            self._handle_end(child, describe_exit(event.exit_code))
        elif event.name == "failed":  # told once, with what follows from it, when the process ends
            child.last_error = str(event.values.get("error", ""))
        else:
            self._show(event)
            if event.name == "crashed":
                child.last_error = "crashed; its log above says where"
            elif event.name == ("ready" if child is self._bootstrap else "attached"):
                if self._serving and not child.ready:
                    self._say(f"{child.name} is back")
                child.ready = child.was_ready = True

    def _handle_end(self, child: Child, how: str) -> None:
        reason = child.last_error or how
        if not self._serving:
            raise CommandError(f"{child.name} did not start: {reason}")
        delay = child.restart_delay()
        self._say(f"{child.name} ended ({reason}); starting it again in {delay:g} s")
        self._due[child] = time.monotonic() + delay

    def _follow_start(self, on_serving: Callable[[], None]) -> None:
        """Take the next step of the first start, if it is time for it."""
        if self._serving or not self._bootstrap.ready:
            return
        for gateway in self._gateways:
            if gateway.pid is None:
                gateway.start()
        if all(gateway.ready for gateway in self._gateways):
            self._serving = True
            on_serving()

    def _signal_and_wait(self, group: Sequence[Child], number: signal.Signals, seconds: float) -> None:
        """Signal a group and wait for its end; no longer than told, and no longer once a stop is asked for again."""
        for child in group:
            if child.alive:
                child.signal(number)
        stops, deadline = self._stops, time.monotonic() + seconds
        while any(child.alive for child in group) and self._stops == stops:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if event.name == STOP:
                self._stops += 1
            elif event.exit_code is None:
                self._show(event)

"""What ``blink up`` tells its operator: progress while it starts, then only what matters."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from services.cli.children import Event
from services.cli.program import address_flag, command

QUIET = {"level", "timestamp", "role", "pid", "logger"}


class Report:
    """Turns the children's events into lines and a progress bar on the console."""

    def __init__(self, console: Console, verbose: bool) -> None:
        self._console = console
        self._verbose = verbose
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("starting the engine", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, markup=False)

    def show(self, event: Event) -> None:
        """Show a child's event: progress in the bar, warnings and errors as lines, the rest when verbose."""
        values = event.values
        if event.name == "loading":
            stage, done, total = values["stage"], values["done"], values["total"]
            self._bar.update(self._task, description=str(stage), completed=done, total=total)
        elif event.name == "ready":
            self._bar.update(self._task, description="starting gateways", completed=0, total=None)
        elif event.name == "draining" and (streams := values.get("open_streams")):
            what = "1 stream" if streams == 1 else f"{streams} streams"
            limit = values["limit_seconds"]
            self.say(f"{event.child.name}: draining {what}, at most {limit:g} s; Ctrl-C again stops at once")
        if self._verbose or values.get("level") in {"warning", "error", "critical"}:
            details = " ".join(f"{key}={value}" for key, value in values.items() if key not in QUIET)
            self.say(f"{event.child.name}: {event.name} {details}".rstrip())

    def started(self, model: str, address: str, workers: int, seconds: float, needs: Sequence[str] = ()) -> None:
        """Everything serves. ``needs``: variables without which no client command gets in."""
        self._bar.stop()
        gateways = "1 gateway worker" if workers == 1 else f"{workers} gateway workers"
        self._console.print(
            f"[bold green]serving[/] {model} at [bold]{address}[/] ({gateways}, started in {seconds:.1f} s)"
        )
        flag = address_flag(address)
        generate, status = command("generate", '"Hello"', *flag), command("status", "--watch", *flag)
        told = f" with {' and '.join(needs)} set" if needs else ""
        self.say(f"Try `{generate}` or `{status}` in another terminal{told}; Ctrl-C drains and stops.")

    def serving_http(self, address: str, tls: bool) -> None:
        """The OpenAI API serves too."""
        where = address if address.startswith("unix:") else f"{'https' if tls else 'http'}://{address}"
        self.say(f"OpenAI API at {where}/v1, metrics at {where}/metrics")

    def stopping(self) -> None:
        """A stop was asked for."""
        self._bar.stop()
        self.say("stopping")

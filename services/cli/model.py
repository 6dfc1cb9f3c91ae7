"""``blink model``: fetches with a progress bar, and lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from services.bootstrap.store import KnownModel, ModelStore, known_model
from services.cli.errors import StoppedError


def fetch(name: str, console: Console) -> Path:
    """Pull a known model, showing every stage; returns its path.

    Raises:
        ModelStoreError: unknown name, network or disk failure, or content that is not the pinned one.
        StoppedError: interrupted.
    """
    known_model(name)  # before a bar is drawn for it
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with _interruptible(name), bar:
        task = bar.add_task(f"{name}: looking", total=None)
        shown = ""

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal shown
            if stage != shown:
                shown = stage
                bar.reset(task, description=f"{name}: {stage}", total=total, completed=done)
            bar.update(task, completed=done)

        return ModelStore().pull(
            name, progress, on_wait=lambda: console.print(f"{name}: waiting for another pull to end")
        )


@contextmanager
def _interruptible(name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"interrupted; the next pull of {name} goes on from here") from None


def pull(name: str) -> None:
    """``blink model pull``."""
    console = Console(stderr=True)
    path = fetch(name, console)
    Console(soft_wrap=True).print(str(path), markup=False, highlight=False)


def show() -> None:
    """``blink model list``."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "state", "download", "on disk", "description"):
        table.add_column(heading, no_wrap=heading != "description")
    for stored in ModelStore().models():
        state = "not pulled"
        if stored.present:
            state = "pulled"
        elif stored.partial_bytes:
            state = f"{100 * stored.partial_bytes // stored.model.wheel.bytes}% pulled"
        table.add_row(stored.model.name, state, *_sizes(stored.model), stored.model.description)
    Console().print(table)


def _sizes(model: KnownModel) -> tuple[str, str]:
    return f"{model.wheel.bytes / 1e6:.0f} MB", f"{model.gguf.bytes / 1e6:.0f} MB"

"""``blink model``: fetches with a progress bar, and lists."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from services.bootstrap.store import ModelStore


def fetch(name: str, console: Console) -> Path:
    """Pull a known model, showing every stage; returns its path. Raises ModelStoreError."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
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


def pull(name: str) -> None:
    """``blink model pull``."""
    console = Console(stderr=True)
    path = fetch(name, console)
    Console(soft_wrap=True).print(str(path), markup=False, highlight=False)


def show() -> None:
    """``blink model list``."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "state", "size", "description"):
        table.add_column(heading, no_wrap=heading != "description")
    for stored in ModelStore().models():
        size = stored.model.gguf.bytes
        state = "not pulled"
        if stored.present:
            state = "pulled"
        elif stored.partial_bytes:
            state = f"{100 * stored.partial_bytes // stored.model.wheel.bytes}% pulled"
        table.add_row(stored.model.name, state, f"{size / 1e6:.0f} MB", stored.model.description)
    Console().print(table)

"""What ``blink up`` tells its operator."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.report import Report


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        ([], "in another terminal; Ctrl-C"),
        (["BLINK_API_KEY"], "in another terminal with BLINK_API_KEY set; Ctrl-C"),
        (["BLINK_TLS_AUTHORITY", "BLINK_API_KEY"], "with BLINK_TLS_AUTHORITY and BLINK_API_KEY set; Ctrl-C"),
    ],
)
def test_what_to_try_next_names_what_it_needs_to_get_in(needs: list[str], told: str) -> None:
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False)
    Report(console, verbose=False).started("a-model", "127.0.0.1:50051", 1, 2.0, needs)
    assert isinstance(console.file, io.StringIO)
    assert told in console.file.getvalue()

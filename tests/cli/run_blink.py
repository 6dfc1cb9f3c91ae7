"""Runs the ``blink`` command as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

BLINK = [sys.executable, "-m", "services.cli"]


def blink(
    *arguments: str, environment: Mapping[str, str] | None = None, limit: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, for at most ``limit`` seconds; output is captured, nothing is asserted."""
    return subprocess.run(
        [*BLINK, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
        env={**os.environ, **(environment or {})},
    )


def assert_one_line_failure(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command failed with a code, and said why in one line that holds ``words``; no traceback."""
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("blink: ")]
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.stderr


def shown_key(stderr: str) -> str:
    """The key that ``blink key new`` has shown."""
    (key,) = (line for line in stderr.splitlines() if line.startswith("bk-"))
    return key

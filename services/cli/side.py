"""``blink engine`` and ``blink gateway``: one side of Blink, where the other runs on another machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run_side(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become the process: it gets the signals, and its exit code is the command's."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 (our own modules, no shell)

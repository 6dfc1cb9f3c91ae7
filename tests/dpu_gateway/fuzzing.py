"""How long fuzz tests run: the same few examples each time, or with BLINK_FUZZ_EXAMPLES=N that many random ones."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

LONG = int(os.environ.get("BLINK_FUZZ_EXAMPLES", "0"))


def fuzzing(examples: int) -> settings:
    """``examples`` of a test that says how many it takes to be worth something."""
    return settings(
        max_examples=LONG or examples,
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def open_files() -> int:
    """File descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())

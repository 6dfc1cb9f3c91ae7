"""The soak of bench/mixed_soak.py, short: its own audit decides."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("flags", [[], ["--tls"]])
def test_requests_by_both_protocols_with_random_cancels_leave_everything_as_before(flags: list[str]) -> None:
    program = [sys.executable, "-m", "bench.mixed_soak", "--requests", "300", "--seed", "7", *flags]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("no fault")

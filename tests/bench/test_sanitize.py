"""What counts as a clean run under compute-sanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from bench.sanitize import FOUND, PRINTED, Check, run

LOOP = Check("racecheck", "gpu", "own", "control_loop")
ALL = Check("racecheck", "host", "brief")
SERVED = "served 9 requests, 23 tokens, 1 cancelled"
INSIDE = "void blink::core::poll<blink::cuda::BlockContext<(unsigned int)256>>(T1 &, blink::core::State &, bool)"
SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def hazard(kernel: str) -> str:
    between = f"Race reported between Write access at {kernel}+0x4680"
    return f"========= Error: {between}\n=========     and Read access at {kernel}+0x46e0"


@pytest.mark.parametrize(
    ("check", "printed", "code", "clean"),
    [
        (ALL, [SERVED, SUMMARY], 0, True),
        (ALL, [hazard("attention"), SERVED, SUMMARY], FOUND, False),
        (LOOP, [hazard("attention"), SERVED, SUMMARY], FOUND, True),
        (LOOP, [hazard("control_loop"), SERVED, SUMMARY], FOUND, False),
        (LOOP, [hazard("attention"), hazard("control_loop"), SERVED, SUMMARY], FOUND, False),
        (LOOP, [hazard("attention"), hazard(INSIDE), SERVED, SUMMARY], FOUND, False),  # a function that the loop calls
        (LOOP, [*[hazard("attention")] * PRINTED, SERVED, SUMMARY], FOUND, False),  # others may not have been printed
        (LOOP, [hazard("attention"), SUMMARY], FOUND, False),  # the requests did not end
        (LOOP, [SERVED, SUMMARY], FOUND, False),  # an error that is no race
        (LOOP, [hazard("attention"), SERVED, SUMMARY], 1, False),
        (LOOP, [SERVED], 0, False),  # the sanitizer did not come to its end
    ],
)
def test_only_a_whole_run_without_hazards_in_what_is_watched_is_clean(
    tmp_path: Path, check: Check, printed: list[str], code: int, clean: bool
) -> None:
    sanitizer = tmp_path / "sanitizer"
    lines = "\n".join(printed)
    sanitizer.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexit {code}\n")
    sanitizer.chmod(0o755)
    assert run(check, str(sanitizer), tmp_path, 30.0).clean is clean


def test_a_run_that_must_be_stopped_is_not_clean(tmp_path: Path) -> None:
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text(f"#!/bin/sh\necho '{SERVED}'\necho '{SUMMARY}'\nsleep 60\n")
    sanitizer.chmod(0o755)
    verdict = run(ALL, str(sanitizer), tmp_path, 0.5)
    assert not verdict.clean
    assert "not done" in verdict.what

"""The sum over several runs of the soak."""

from __future__ import annotations

from pathlib import Path

from bench.soak_audit import Audited, append


def test_runs_of_one_commit_add_up_and_others_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    append(file, Audited("old", 999.0, 9, 9, 9.0, "broken"))
    append(file, Audited("new", 500.0, 1000, 70_000, 0.004))
    assert append(file, Audited("new", 70.4, 200, 9_000, 0.0125, "pages leaked")) == (
        "commit new: 570 s of load in 2 runs, 1,200 requests, 79,000 tokens, 1 faults, oldest heartbeat 12.5 ms"
    )

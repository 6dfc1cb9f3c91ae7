"""``blink bench`` as a user runs it, against a server with known delays."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from services.cli.bench.report import Report
from tests.cli.bench.stand_in_server import StandInServer
from tests.cli.run_blink import assert_one_line_failure, blink

DOCS = Path(__file__).parents[3] / "docs/bench.md"
SMALL = ["--seconds", "0.5", "--warm-up", "0.1", "--prompt-tokens", "4", "--output-tokens", "3", "--processes", "1"]


def test_a_sweep_is_written_as_json_a_table_and_plots(tmp_path: Path) -> None:
    with StandInServer(0.01, 0.001).running() as server:
        arguments = ["--rate", "10", "--rate", "20", "--arrivals", "constant", "--repeats", "2", "--slo-ttft", "60000"]
        done = blink("bench", "--openai", server.url, *SMALL, *arguments, "--output", str(tmp_path), "--label", "it")
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json((tmp_path / "bench.json").read_text())
    assert [(point.load, point.requests, point.failed) for point in report.points] == [(10, 10, {}), (20, 20, {})]
    assert (report.model, report.protocol, report.version) == ("stand-in", "completions", "blink-bench/1")
    for point in report.points:
        assert point.ttft_ms is not None
        assert point.ttft_ms.p50.mean >= 10
        assert point.ttft_ms.p50.low is not None
        assert point.slo_share is not None
        assert point.slo_share.mean == 1
        assert point.offered_requests_per_s is not None
        assert point.offered_requests_per_s.mean == pytest.approx(point.load)
    table = (tmp_path / "bench.md").read_text()
    assert done.stdout.strip() == table.strip()
    assert table.startswith("**it**")
    assert {path.name for path in tmp_path.glob("*.png")} == {"ttft.png", "tpot.png", "itl.png", "throughput.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


def test_the_search_stops_where_the_slo_breaks(tmp_path: Path) -> None:
    """A limit below the server's own delay is kept at no rate; so the search ends, without a maximum."""
    with StandInServer(0.05).running() as server:
        arguments = ["--search", "--slo-ttft", "10", "--rate", "8", "--repeats", "1", "--max-lateness", "10000"]
        done = blink("bench", "--openai", server.url, *SMALL, *arguments, "--output", str(tmp_path))
    assert_one_line_failure(done, "has no request")  # the rate has become so low that nothing arrives
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--address", "127.0.0.1:1"], ["no gateway answers at 127.0.0.1:1"]),
        (["--openai", "http://127.0.0.1:1/v1"], ["no server answers at http://127.0.0.1:1/v1:", "--openai"]),
        (["--openai", "ftp://x"], ["--openai", "ftp://x"]),
        (["--prompt-tokens", "many"], ["many", "distribution"]),
        (["--rate", "0"], ["'0'", "not a number"]),
        (["--search"], ["--search", "--slo-ttft"]),
        (["--trace", "/nowhere"], ["trace /nowhere: No such file or directory"]),
        (["--cpus", "x"], ["--cpus", "'x'"]),
        (["--cpus", "4000"], ["--cpus", "4000"]),
        (["--interfere", "1"], ["--interfere", "--cpus"]),
        (["--interfere", "1", "--cpus", "0", "--interfere-cpus", "0"], ["--interfere-cpus", "0"]),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(arguments: list[str], words: list[str]) -> None:
    assert_one_line_failure(blink("bench", *arguments), *words)


def test_the_schema_is_printed_and_every_field_of_it_is_documented() -> None:
    schema = json.loads(blink("bench", "--schema").stdout)
    fields = set(schema["properties"]) | {name for part in schema["$defs"].values() for name in part["properties"]}
    documented = set(re.findall(r"`(\w+)`", DOCS.read_text()))
    assert fields <= documented, fields - documented


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="neighbours need a CPU of their own")
def test_neighbours_run_on_their_own_cpus_and_are_gone_afterwards(tmp_path: Path) -> None:
    own, *others = sorted(os.sched_getaffinity(0))
    with StandInServer().running() as server:
        arguments = ["--rate", "10", "--repeats", "1", "--interfere", "3", "--cpus", str(own)]
        theirs = ["--interfere-cpus", str(others[0]), "--output", str(tmp_path)]
        done = blink("bench", "--openai", server.url, *SMALL, *arguments, *theirs, limit=110)  # they start slowly
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json((tmp_path / "bench.json").read_text())
    beside = report.points[0].interference
    assert beside is not None
    assert (beside.count, beside.cpus, report.cpus) == (3, [others[0]], [own])
    assert min(beside.copy_gb_per_s, beside.update_gb_per_s, beside.walk_gb_per_s) > 0

"""``blink tenants``: what it shows of a cluster's objects, and how it fails without a cluster."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.tenants import render
from tests.cli.run_blink import assert_one_line_failure, blink
from tests.colocation.objects import pool, tenant

Json = dict[str, Any]


def text(pools: list[Json], things: list[Json]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(render(pools, things))
    return stream.getvalue()


def test_it_shows_who_runs_where_and_why_one_waits() -> None:
    full = {"nodes": 2, "freedCores": 12, "usedCores": 4, "waiting": 1, "slo": "P99 TTFT 20.0 ms of 200 ms"}
    runs = {"phase": "Running", "node": "n0", "cores": 4, "message": "runs on n0 with 4 cores"}
    waits = {"phase": "Waiting", "position": 1, "message": "no node of TenantPool p has room for 2 cores"}
    shown = text(
        [{**pool(), "status": {**full, "guard": {"stage": "Normal"}}}],
        [{**tenant("b"), "status": waits}, {**tenant("a", cores={"min": 2, "max": 8}), "status": runs}],
    )
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    assert lines[1] == "p 2 12 4 1 Normal P99 TTFT 20.0 ms of 200 ms"
    assert lines[3] == "batch/a p Running n0 4 of 2-8 0 runs on n0 with 4 cores"
    assert lines[4] == "batch/b p Waiting - 0 of 2-2 0 no node of TenantPool p has room for 2 cores, 1. in line"


def test_what_is_wrong_with_a_pool_is_shown_instead_of_its_slo() -> None:
    conflict = {"type": "Conflicted", "status": "True", "reason": "NodesOfAnotherPool", "message": "n0 (of 'q')"}
    assert "NodesOfAnotherPool: n0 (of 'q')" in text([{**pool(), "status": {"conditions": [conflict]}}], [])


def test_objects_that_no_operator_has_seen_yet_are_shown() -> None:
    assert "new" in text([pool()], [tenant()])


def test_an_empty_cluster_is_said_to_be_empty() -> None:
    assert "no TenantPools" in text([], [])


def test_without_a_cluster_it_fails_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "none"
    done = blink("tenants", environment={"KUBECONFIG": str(config)})
    assert_one_line_failure(done, "no cluster to ask: this is no pod", str(config), "set KUBECONFIG")


def test_a_cluster_that_does_not_answer_is_named_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: u, user: {}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"
    )
    done = blink("tenants", environment={"KUBECONFIG": str(config)})
    assert_one_line_failure(done, "no cluster answers at http://127.0.0.1:1", "KUBECONFIG")

"""Beside a real Kueue: the operator gives a queued tenant its node, and Kueue alone starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.colocation.names import QUEUE_LABEL
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kueue import Kueue
from tests.cluster.operators import Operator
from tests.cluster.scene import JOBS, TENANTS, Scene, eventually, tenant_manifest

QUEUE = "team"


@pytest.fixture
def kueue(plane: ControlPlane, tmp_path: Path) -> Iterator[Kueue]:
    with Kueue(plane, tmp_path) as running:
        yield running


@pytest.fixture
def operator(kueue: Kueue, plane: ControlPlane, scene: Scene, tmp_path: Path) -> Iterator[Operator]:
    """Started after Kueue, which it looks for then."""
    with Operator(plane.kubeconfig_of("serving", "blink-operator"), tmp_path) as running:
        yield running
        scene.clear()


def add(scene: Scene, name: str, cores: int, **spec: Any) -> None:
    thing = tenant_manifest(name, cores, **spec)
    thing["spec"]["template"]["metadata"] = {"labels": {QUEUE_LABEL: QUEUE}}
    scene.client.create(TENANTS, thing)


def test_a_queued_tenant_runs_where_the_operator_says_and_when_kueue_says(
    operator: Operator, scene: Scene, kueue: Kueue
) -> None:
    kueue.queue(QUEUE, "batch", cores=2)
    scene.node("n0", 8)
    scene.pool()
    add(scene, "first", 2)
    first = scene.running_pod("first")
    assert first["spec"]["nodeName"] == "n0"
    scene.phase("first", "Running")
    add(scene, "second", 2)
    status = scene.phase("second", "Waiting")
    eventually(lambda: "queue in Kueue" in scene.status("second").get("message", ""), lambda: f"{status} {kueue.log()}")
    job = scene.client.get(f"{JOBS}/second")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"][QUEUE_LABEL] == QUEUE
    scene.kubelet.finish(first)
    scene.phase("first", "Succeeded")
    assert scene.running_pod("second")["spec"]["nodeName"] == "n0"


def test_a_queued_tenant_that_gives_way_is_not_started_again_by_kueue(
    operator: Operator, scene: Scene, kueue: Kueue
) -> None:
    kueue.queue(QUEUE, "batch", cores=16)
    scene.node("n0", 4)
    scene.pool()
    add(scene, "low", 4)
    scene.running_pod("low")
    scene.tenant("urgent", 4, priority=10, preemption="LowerPriority")
    assert scene.running_pod("urgent")
    eventually(lambda: not scene.pods("low"), kueue.log)
    assert scene.phase("low", "Waiting")
    eventually(lambda: QUEUE_LABEL not in scene.client.get(f"{JOBS}/low")["metadata"]["labels"], operator.log)

"""Tests on a real control plane. They run with ``-m cluster`` (make test-cluster), one after another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import Client, ControlPlane
from tests.cluster.hollow import HollowKubelet
from tests.cluster.operators import Operator
from tests.cluster.processes import ENDED, end_by_sigterm
from tests.cluster.scene import Scene
from tests.deploy.chart.rendering import rendered

_HERE = Path(__file__).parent
PATHS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
}


def pytest_configure(config: pytest.Config) -> None:
    """A run that is told to end takes down what it has started."""
    if {"cluster", "node"} & set(config.option.markexpr.split()) and "PYTEST_XDIST_WORKER" not in os.environ:
        end_by_sigterm(lambda: pytest.exit("told to end", ENDED))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = "cluster" in config.option.markexpr and "PYTEST_XDIST_WORKER" not in os.environ
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(300))
            if not asked_for:
                item.add_marker(pytest.mark.skip("runs on a control plane of its own: make test-cluster"))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The control plane, with what the chart installs for the operator."""
    users = {"ada": ["tenants"], "eve": ["nobody"]}
    with ControlPlane(tmp_path_factory.mktemp("plane"), users) as running:
        client = running.client()
        client.create("/api/v1/namespaces", {"metadata": {"name": "serving"}})
        client.create("/api/v1/namespaces", {"metadata": {"name": "batch"}})
        people = {"tenants": {"namespace": "batch", "users": [{"kind": "User", "name": "ada"}]}}
        for thing in rendered("cpu-demo", people):
            if thing["kind"] in PATHS and "helm.sh/hook" not in thing["metadata"].get("annotations", {}):
                client.create(PATHS[thing["kind"]].format(thing["metadata"].get("namespace")), thing)
        _wait_for_kinds(client)
        yield running


@pytest.fixture
def client(plane: ControlPlane) -> Client:
    return plane.client()


@pytest.fixture
def scene(client: Client) -> Iterator[Scene]:
    """Nodes, pools and tenants of one test; nothing of them is left."""
    with HollowKubelet(client) as kubelet:
        made = Scene(client, kubelet)
        yield made
        made.clear()


@pytest.fixture
def operator(plane: ControlPlane, scene: Scene, tmp_path: Path) -> Iterator[Operator]:
    """The operator's process with the rights that the chart gives it."""
    with Operator(plane.kubeconfig_of("serving", "blink-operator"), tmp_path) as running:
        yield running
        scene.clear()


def _wait_for_kinds(client: Client) -> None:
    from tests.cluster.scene import eventually  # noqa: PLC0415

    for plural in ("tenantpools", "tenants"):
        eventually(lambda plural=plural: client.find(f"/apis/blink.dev/v1alpha1/{plural}") is not None)  # type: ignore[misc]

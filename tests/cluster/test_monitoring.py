"""What the chart tells Prometheus is what the Prometheus operator's own kinds take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.control_plane import Client, Json
from tests.cluster.monitoring import kinds
from tests.cluster.scene import eventually
from tests.deploy.chart.rendering import PROFILES, rendered

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
API = "/apis/monitoring.coreos.com/v1"
PATHS = {kind: f"{API}/namespaces/serving/{kind.lower()}s" for kind in ("ServiceMonitor", "PodMonitor")}
STRICTLY = "?fieldValidation=Strict"


@pytest.fixture(scope="module")
def kinds_there(plane: Any) -> Iterator[None]:
    client: Client = plane.client()
    made = [client.create(CRDS, yaml.safe_load(path.read_text()))["metadata"]["name"] for path in kinds()]
    eventually(lambda: all(client.find(path) is not None for path in PATHS.values()))
    yield
    for name in made:
        client.delete(f"{CRDS}/{name}")


def monitors(profile: str) -> list[Json]:
    values = {"serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}}}
    return [each for each in rendered(profile, values) if each["kind"] in PATHS]


@pytest.mark.usefixtures("kinds_there")
@pytest.mark.parametrize("profile", PROFILES)
def test_the_prometheus_operators_own_kinds_take_every_profiles_monitors(client: Client, profile: str) -> None:
    found = monitors(profile)
    assert {each["kind"] for each in found} == set(PATHS)
    for each in found:
        path = PATHS[each["kind"]]
        kept = client.create(path + STRICTLY, each)
        try:
            assert kept["spec"] == each["spec"]  # nothing was pruned
        finally:
            client.delete(f"{path}/{each['metadata']['name']}")


@pytest.mark.usefixtures("kinds_there")
def test_these_kinds_refuse_what_they_do_not_know(client: Client) -> None:
    for each in monitors("cpu-demo"):
        path = PATHS[each["kind"]] + STRICTLY
        (endpoints,) = (name for name in each["spec"] if name.lower().endswith("endpoints"))
        for field, value, status in (("intervall", "30s", 400), ("interval", "30 parsecs", 422)):
            wrong = {**each["spec"], endpoints: [{**each["spec"][endpoints][0], field: value}]}
            answer = client.call("POST", path, {**each, "spec": wrong})
            assert answer.status_code == status, answer.text

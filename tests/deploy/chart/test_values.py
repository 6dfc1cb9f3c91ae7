"""values.schema.json refuses every value that is unknown, of another kind, or contradicts another."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from services.bootstrap.settings import BootstrapSettings
from services.dpu_gateway.settings import GatewaySettings
from tests.deploy.chart.rendering import CHART, PROFILES, Json, defaults, template
from tests.deploy.chart.settings_schema import SECTIONS, schema_of

SCHEMA: Json = yaml.safe_load((CHART / "values.schema.json").read_text())
FREE = {("service", "annotations"), ("serviceMonitor", "labels"), ("model", "volume")}


def paths(values: Json, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every map and every value in it."""
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def changed(path: tuple[str, ...], value: Any) -> Json:
    values = copy.deepcopy(defaults())
    within = values
    for name in path[:-1]:
        within = within[name]
    within[path[-1]] = value
    return values


def refused(values: Json) -> bool:
    return not jsonschema.Draft7Validator(SCHEMA).is_valid(values)


def value_at(path: tuple[str, ...]) -> Any:
    value: Any = defaults()
    for name in path:
        value = value[name]
    return value


def is_open(path: tuple[str, ...]) -> bool:
    return path in FREE or path[-1] in {"settings", "requests", "limits", "nodeSelector"}


MAPS = [path for path in paths(defaults()) if isinstance(value_at(path), dict) and not is_open(path)]


@pytest.mark.parametrize("path", MAPS, ids=".".join)
def test_a_name_that_is_unknown_is_refused_in_every_map(path: tuple[str, ...]) -> None:
    assert refused(changed((*path, "unknwon"), 1))


@pytest.mark.parametrize("path", list(paths(defaults())), ids=".".join)
def test_a_value_of_another_kind_is_refused_everywhere(path: tuple[str, ...]) -> None:
    value = value_at(path)
    another: Any = "no-number" if isinstance(value, int) else True
    assert refused(changed(path, another))


@pytest.mark.parametrize("name", ["model", "engine", "transport", "listen", "handshake_key"])
def test_what_the_chart_decides_can_not_be_set_a_second_time(name: str) -> None:
    assert refused(changed(("engine", "settings", name), "x"))
    assert not refused(changed(("engine", "settings", "kv_tokens"), 4096))


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "verbs without certificates": ("cpu-demo", {"transport": "verbs"}),
        "certificates without verbs": ("cpu-demo", {"handshake": {"engineSecret": "x"}}),
        "a DaemonSet of one pod's gateways": ("cpu-demo", {"gateway": {"kind": "DaemonSet"}}),
        "an RDMA device without verbs": ("gpu-shm", {"engine": {"rdmaResource": "example.com/hca"}}),
        "two engines behind one address": ("dpu-rdma", {"engine": {"replicas": 2}}),
        "replicas of a DaemonSet": ("dpu-rdma", {"gateway": {"replicas": 3}}),
        "a path that is to be fetched": ("gpu-shm", {"model": {"pull": True}}),
        "a path outside the volume": ("gpu-shm", {"model": {"name": "/data/x"}}),
        "an empty volume and nothing fetched": ("cpu-demo", {"model": {"pull": False}}),
        "CRDs that are kept and not installed": ("cpu-demo", {"crds": {"install": False, "keep": True}}),
        "a namespace that has no name": ("cpu-demo", {"tenants": {"createNamespace": True}}),
        "a cuda engine without a device": ("gpu-shm", {"engine": {"resources": {"limits": {"nvidia.com/gpu": None}}}}),
        "a cuda engine in the cpu's image": ("gpu-shm", {"images": {"engine": {"repository": "blink/engine-cpu"}}}),
        "an account without its namespace": (
            "cpu-demo",
            {"tenants": {"namespace": "batch", "users": [{"kind": "ServiceAccount", "name": "x"}]}},
        ),
        "a setting that no engine has": ("cpu-demo", {"engine": {"settings": {"kv_tokenz": 4096}}}),
        "a setting that no gateway has": ("cpu-demo", {"gateway": {"settings": {"kv_tokens": 4096}}}),
        "a setting that no operator has": ("cpu-demo", {"operator": {"settings": {"intervall": 4}}}),
        "a setting out of its range": ("cpu-demo", {"engine": {"settings": {"slots_per_lane": 4097}}}),
        "a choice that there is not": ("cpu-demo", {"engine": {"settings": {"kv_cache": "fp4"}}}),
    }.values(),
)
def test_helm_refuses_values_that_contradict_each_other(name: str, values: Json) -> None:
    done = template(name, values)
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr


@pytest.mark.parametrize("section", SECTIONS)
def test_the_settings_that_the_schema_takes_are_those_that_the_process_takes(section: str) -> None:
    assert SCHEMA["properties"][section]["properties"]["settings"] == schema_of(section), (
        "python -m tests.deploy.chart.settings_schema"
    )


DEFAULTS = {
    name: field.default
    for process in (BootstrapSettings, GatewaySettings)
    for name, field in process.model_fields.items()
}
LANES, SHARED = DEFAULTS["lanes"], DEFAULTS["lanes_per_certificate"]


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("cpu-demo", {"service": {"grpcPort": 8000}}, "service.grpcPort and service.httpPort are both 8000"),
        ("cpu-demo", {"priorityClasses": {"tenants": 1_000_000}}, "must be above priorityClasses.tenants (1000000)"),
        ("cpu-demo", {"gateway": {"workers": LANES + 1}}, f"is {LANES + 1}, but the engine has lanes for {LANES}"),
        (
            "dpu-rdma",
            {"gateway": {"workers": SHARED + 1}, "engine": {"settings": {"lanes": 64}}},
            f"the engine has lanes for {SHARED}: set engine.settings.lanes and lanes_per_certificate",
        ),
        ("dpu-rdma", {"gateway": {"kind": "Deployment", "replicas": 2}}, "gateway.workers x gateway.replicas is 8"),
        ("gpu-shm", {"engine": {"settings": {"ring_memory": "device"}}}, "engine.settings.ring_memory is device"),
        ("dpu-rdma", {"engine": {"settings": {"scheduler": "host"}}}, "engine.settings.ring_memory is device"),
        ("cpu-demo", {"engine": {"settings": {"drain_seconds": 40.5}}}, "drain_seconds is 40.5: pods are killed 45 s"),
        ("cpu-demo", {"gateway": {"settings": {"poll_fast_us": 5000}}}, "poll_slow_us is 2000, must be at least"),
        ("cpu-demo", {"gateway": {"settings": {"api_keys": "/keys.toml"}}}, "gateway.settings.api_keys names a file"),
        ("cpu-demo", {"tenants": {"namespace": "serving"}}, "tenants.namespace is serving, which is serving's"),
    ],
)
def test_helm_refuses_figures_that_contradict_each_other(name: str, values: Json, why: str) -> None:
    done = template(name, values)
    assert done.returncode != 0
    assert why in done.stderr


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cpu-demo", {"gateway": {"workers": LANES}}),
        ("dpu-rdma", {"gateway": {"workers": SHARED}, "engine": {"settings": {"lanes": 64}}}),
        ("cpu-demo", {"engine": {"settings": {"drain_seconds": 40}}}),
        ("cpu-demo", {"gateway": {"settings": {"poll_fast_us": DEFAULTS["poll_slow_us"]}}}),
        ("cpu-demo", {"gateway": {"settings": {"poll_slow_us": DEFAULTS["poll_fast_us"]}}}),
    ],
)
def test_helm_takes_the_last_figures_that_do_not(name: str, values: Json) -> None:
    assert template(name, values).returncode == 0


@pytest.mark.parametrize("name", PROFILES)
def test_helm_takes_every_profile(name: str) -> None:
    assert template(name).returncode == 0

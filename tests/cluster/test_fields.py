"""Every field of the CRDs: the API server refuses each kind of wrong value and names the field."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.control_plane import Client, Json
from tests.cluster.scene import POOLS, TENANTS, dry, pool_manifest, tenant_manifest
from tests.deploy.chart.rendering import CHART

Field = tuple[str | int, ...]
MISSING = object()


def pool() -> Json:
    """With every field that there is."""
    guard = {
        "metricsURLs": ["http://gateway:8000/metrics"],
        "ttftP99Milliseconds": 200,
        "tpotP99Milliseconds": 50,
        "windowSeconds": 30,
        "recoveryPercent": 80,
        "restoreAfterSeconds": 60,
    }
    night = {"start": "22:00", "end": "06:00", "days": ["Mon", "Fri"]}
    return pool_manifest(
        serving={"baselineCores": 2, "reservedCores": 1},
        ceilings={"cpuPercent": 50, "memoryBandwidthMBps": 100_000, "rdtClass": "tenants"},
        sloGuard=guard,
        evictionOrder="NewestFirst",
        schedule={"timeZone": "Europe/Berlin", "windows": [night]},
    )


def tenant() -> Json:
    thing = tenant_manifest(
        "t",
        2,
        8,
        priority=1000,
        preemption="LowerPriority",
        deadline="2030-01-01T00:00:00Z",
        memoryBandwidthMBpsPerCore=2000,
    )
    template = thing["spec"]["template"]
    template["metadata"] = {"labels": {"a": "b"}, "annotations": {"a": "b"}}
    template["spec"]["parallelism"] = 1
    pod = template["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["resources"]["limits"] = {"memory": "64Mi"}
    container["resources"]["requests"] = {"cpu": 1, "ephemeral-storage": "1Gi"}
    container |= {"ports": [{"containerPort": 80, "hostPort": 0}], "securityContext": {"privileged": False}}
    pod |= {
        "restartPolicy": "Never",
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
        "initContainers": [{**copy.deepcopy(container), "name": "before"}],
        "resourceClaims": [],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        **dict.fromkeys(("hostNetwork", "hostPID", "hostIPC"), False),
    }
    return thing


def schema(plural: str) -> Json:
    """Of the spec."""
    text = (CHART / "files" / "crds" / f"{plural}.yaml").read_text()
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    found: Json = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def fields(of: Json, above: Field = ("spec",)) -> Iterator[tuple[Field, Json]]:
    """Each with its path; of a list, its first element."""
    for name, each in of.get("properties", {}).items():
        yield (*above, name), each
        yield from fields(each, (*above, name))
    if "items" in of:
        yield (*above, 0), of["items"]
        yield from fields(of["items"], (*above, 0))


def wrong_values(of: Json, required: bool) -> Iterator[tuple[str, Any]]:
    """One for each thing that the schema of a field demands, with what is wrong about it."""
    yield "another type", 7 if of["type"] in {"string", "boolean"} else "text"
    if required:
        yield "missing", MISSING
    if "minimum" in of:
        yield "too small", of["minimum"] - 1
        yield "too large", of["maximum"] + 1
    if "enum" in of:
        yield "no choice of it", "Another"
    if "pattern" in of:
        yield "another pattern", " "
    if "maxLength" in of:
        yield "too long", "a" * (of["maxLength"] + 1)
    if of.get("minLength") or of.get("minItems") or of.get("minProperties"):
        yield "empty", {"string": "", "array": [], "object": {}}[of["type"]]
    if "maxProperties" in of:
        yield "too many", {f"a{index}": "b" for index in range(of["maxProperties"] + 1)}
    if of.get("format") == "date-time":
        yield "no time", "tomorrow"


def cases() -> Iterator[Any]:
    """Of all fields of both."""
    for plural, path, good in (("tenantpools", POOLS, pool), ("tenants", TENANTS, tenant)):
        whole = schema(plural)
        needed = {
            (*above, name) for above, each in [(("spec",), whole), *fields(whole)] for name in each.get("required", ())
        }
        for field, each in fields(whole):
            for why, value in wrong_values(each, field in needed):
                yield pytest.param(path, good(), field, value, id=f"{plural}.{spelled(field)}: {why}")
            if "maxItems" in each and each.get("x-kubernetes-list-type") != "set":
                value = at(good(), field)[:1] * (each["maxItems"] + 1)
                yield pytest.param(path, good(), field, value, id=f"{plural}.{spelled(field)}: too many")


def spelled(field: Field) -> str:
    """As the API server writes it."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in field).removeprefix(".")


def at(thing: Any, field: Field) -> Any:
    for each in field:
        thing = thing[each]
    return thing


def put(thing: Json, field: Field, value: Any) -> None:
    within = at(thing, field[:-1])
    if value is MISSING:
        del within[field[-1]]
    elif within == []:  # what may not have any
        within.append(value)
    else:
        within[field[-1]] = value


@pytest.mark.parametrize(("path", "good"), [(POOLS, pool), (TENANTS, tenant)])
def test_with_every_field_as_it_should_be_it_is_taken(client: Client, path: str, good: Any) -> None:
    client.create(dry(path), good())


@pytest.mark.parametrize(("path", "thing", "field", "value"), list(cases()))
def test_each_wrong_value_of_each_field_is_refused_by_its_name(
    client: Client, path: str, thing: Json, field: Field, value: Any
) -> None:
    put(thing, field, value)
    answer = client.call("POST", dry(path), thing)
    assert answer.status_code == 422, answer.text
    assert spelled(field) in answer.json()["message"]

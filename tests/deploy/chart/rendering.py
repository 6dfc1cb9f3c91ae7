"""Renders the chart with the real helm."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.fetch_helm import helm

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "blink"
PROFILES = tuple(sorted(path.stem for path in (CHART / "profiles").glob("*.yaml")))
Json = dict[str, Any]


def run(*arguments: str, values: Json | None = None) -> subprocess.CompletedProcess[str]:
    """helm, with ``values`` as one more values file."""
    more = ["--values", "-"] if values is not None else []
    return subprocess.run(
        [helm(), *arguments, *more],
        input=json.dumps(values) if values is not None else None,
        capture_output=True,
        text=True,
        check=False,
    )


def profile(name: str) -> list[str]:
    return ["--values", str(CHART / "profiles" / f"{name}.yaml")]


def template(name: str, values: Json | None = None) -> subprocess.CompletedProcess[str]:
    return run("template", "blink", str(CHART), "--namespace", "serving", *profile(name), values=values)


def rendered(name: str, values: Json | None = None) -> list[Json]:
    done = template(name, values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@functools.cache
def defaults() -> Json:
    found: Json = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def pods(objects: list[Json]) -> list[tuple[str, Json]]:
    """Name and pod spec of everything that makes pods."""
    found = []
    for each in objects:
        if each["kind"] == "Pod":
            found.append((each["metadata"]["name"], each["spec"]))
        elif "template" in each.get("spec", {}):
            found.append((each["metadata"]["name"], each["spec"]["template"]["spec"]))
    return found


def containers(objects: list[Json]) -> list[tuple[str, Json]]:
    return [
        (f"{name}/{each['name']}", each)
        for name, pod in pods(objects)
        for each in (*pod.get("initContainers", ()), *pod["containers"])
    ]

"""The chart on a real node: what is installed serves the model, is changed, taken back and, last of all, removed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

from tests.cluster.control_plane import Json
from tests.cluster.node.images import configuration
from tests.cluster.node.machine import NAME as NODE
from tests.cluster.node.machine import Machine
from tests.cluster.node.release import NAMESPACE, Release
from tests.cluster.scene import eventually

GOLDEN = json.loads((Path(__file__).parents[2] / "gpu_engine/cpu/goldens.json").read_text())["goldens"][0]
TOKENS = 16
WANTED = GOLDEN["tokens"][:TOKENS]
HUNG_SECONDS = 180.0  # the engine is asked every 30 s, and must fail twice


def answers(release: Release) -> bool:
    return bool(release.generate(GOLDEN["prompt"], TOKENS) == WANTED)


def variable(release: Release, name: str) -> str | None:
    """A variable of the one serving pod's engine."""
    (pod,) = (each for each in release.pods("gateway") if "deletionTimestamp" not in each["metadata"])
    engine = next(each for each in pod["spec"]["initContainers"] if each["name"] == "engine")
    return next((each["value"] for each in engine["env"] if each["name"] == name), None)


def test_the_installed_gateway_streams_the_models_own_tokens(release: Release) -> None:
    assert answers(release), release.diagnosis()


def test_its_containers_are_nobodys_root_and_can_write_to_no_image(release: Release, machine: Machine) -> None:
    for component in ("gateway", "operator"):
        for pod in release.pods(component):
            for container in (*pod["status"]["containerStatuses"], *pod["status"].get("initContainerStatuses", ())):
                found = json.loads(machine.ctr("containers", "info", container["containerID"].partition("//")[2]))
                spec = found["Spec"]
                assert (spec["process"]["user"]["uid"], spec["root"]["readonly"]) == (10_001, True), container["name"]
                assert spec["process"]["noNewPrivileges"]
                assert not spec["process"]["capabilities"].get("effective")


def test_each_image_has_a_health_check_that_passes_where_it_runs_and_nowhere_else(release: Release) -> None:
    places = {
        "gateway": ("blink", "gateway-0"),
        "engine-cpu": ("blink", "engine"),
        "operator": ("blink-operator", "operator"),
    }
    checks = {target: configuration(target)["Healthcheck"]["Test"] for target in places}
    for target, (deployment, container) in places.items():
        (kind, *command) = checks[target]
        assert kind == "CMD"
        assert release.passes(deployment, container, command), f"{target}: {release.diagnosis()}"
        elsewhere = next(place for place in places.values() if place[0] != deployment)
        assert not release.passes(*elsewhere, command), target


def test_the_notes_name_the_next_commands_and_these_work(release: Release) -> None:
    notes = release.helm("get", "notes", "blink")
    (wait,) = (line.split() for line in notes.splitlines() if line.strip().startswith("kubectl -n serving wait"))
    assert "condition met" in release.kubectl(*wait[1:])
    assert "helm test blink -n serving" in notes  # as the test below does


def test_what_rdma_needs_is_in_the_image(release: Release) -> None:
    asked = ("exec", "deployment/blink", "--namespace", NAMESPACE, "--container", "gateway-0")
    release.kubectl(*asked, "--", "python", "-c", "import services.ring.verbs.transport")


def test_helm_test_has_a_pod_of_the_cluster_ask_for_an_answer(release: Release) -> None:
    told = release.helm("test", "blink", "--timeout", "120s", "--logs")
    assert "Phase:          Succeeded" in told
    assert "Paris" in told


def test_the_http_side_answers_behind_the_same_service(release: Release) -> None:
    host = release.address().rpartition(":")[0]
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = requests.post(f"http://{host}:8000/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_an_upgrade_changes_a_value_and_a_rollback_takes_it_back(release: Release) -> None:
    before = variable(release, "BLINK_BOOTSTRAP_MAX_RUNNING")
    release.upgrade(engine__settings__max_running="7")
    assert variable(release, "BLINK_BOOTSTRAP_MAX_RUNNING") == "7"
    assert answers(release), release.diagnosis()
    # Back, while somebody asks all the time: nobody's stream is cut.
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: [answers(release) for _ in iter(stop.is_set, True)])
        try:
            roll_back(release)
        finally:
            stop.set()
        assert all(asked.result()), release.diagnosis()
        assert len(asked.result()) > 1
    assert variable(release, "BLINK_BOOTSTRAP_MAX_RUNNING") == before


def roll_back(release: Release) -> None:
    """And wait until the pods before have gone."""
    release.helm("rollback", "blink", "--wait", "--timeout", "300s")
    eventually(lambda: len(release.pods("gateway")) == 1, release.diagnosis)


def test_an_engine_that_is_killed_comes_back_and_is_waited_for(release: Release, machine: Machine) -> None:
    (pod,) = release.pods("gateway")
    (engine,) = pod["status"]["initContainerStatuses"]
    machine.ctr("tasks", "kill", "--signal", "SIGKILL", engine["containerID"].partition("//")[2])

    def came_back() -> bool:
        (now,) = release.pods("gateway")
        (restarted,) = now["status"]["initContainerStatuses"]
        return restarted["restartCount"] == 1 and all(each["ready"] for each in now["status"]["containerStatuses"])

    eventually(came_back, release.diagnosis)
    release.until_reached()
    assert answers(release), release.diagnosis()


def test_a_drained_node_gives_up_serving_and_takes_it_back(release: Release) -> None:
    release.kubectl("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s", "--force")
    running = [p for p in release.pods("gateway") if p["status"]["phase"] == "Running"]
    assert not running
    release.kubectl("uncordon", NODE)
    release.kubectl("rollout", "status", "deployment/blink", "--namespace", NAMESPACE, "--timeout=180s")
    release.until_reached()
    assert answers(release), release.diagnosis()


def test_an_engine_and_a_gateway_that_stand_still_are_restarted(release: Release, machine: Machine) -> None:
    """As a hung GPU leaves the one and a fault of ours the other: the process is there, and answers nobody."""

    def containers() -> dict[str, Json]:
        (pod,) = (each for each in release.pods("gateway") if "deletionTimestamp" not in each["metadata"])
        states = (*pod["status"]["initContainerStatuses"], *pod["status"]["containerStatuses"])
        return {each["name"]: each for each in states}

    before = containers()
    for each in before.values():
        machine.ctr("tasks", "kill", "--signal", "SIGSTOP", each["containerID"].partition("//")[2])

    def came_back() -> bool:
        now = containers()
        again = all(now[name]["restartCount"] > each["restartCount"] for name, each in before.items())
        return again and all(each["ready"] for each in now.values())

    eventually(came_back, release.diagnosis, HUNG_SECONDS)
    release.until_reached()
    assert answers(release), release.diagnosis()

"""A stand-in for kubelets, where only the control plane is real: bound pods run, and end when they are told to.

Pods whose label ``test/stubborn`` is set take no notice of being told, until they are killed; those with ``test/fixed``
are refused another size, as by a kubelet with a static CPU manager.
"""

from __future__ import annotations

import contextlib
import threading

import requests

from tests.cluster.control_plane import Client, Json

LOOK_SECONDS = 0.1
STUBBORN, FIXED = "test/stubborn", "test/fixed"


class HollowKubelet:
    """Serves all nodes. Start it as a context."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HollowKubelet:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def finish(self, pod: Json, phase: str = "Succeeded") -> None:
        """Its container has ended."""
        ended = {"exitCode": 0 if phase == "Succeeded" else 1}
        status = [{**_container(pod), "ready": False, "state": {"terminated": ended}}]
        self._client.patch(f"{_path(pod)}/status", {"status": {"phase": phase, "containerStatuses": status}})

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            with contextlib.suppress(requests.ConnectionError, AssertionError):  # restarts, and pods that just went
                for pod in self._client.items("/api/v1/pods"):
                    self._serve(pod)

    def _serve(self, pod: Json) -> None:
        if not pod["spec"].get("nodeName"):
            return
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata:
            if STUBBORN not in (metadata.get("labels") or {}):
                self._client.delete(_path(pod), {"gracePeriodSeconds": 0})
        elif _resized(pod) and FIXED in (metadata.get("labels") or {}):
            refused = {
                "type": "PodResizePending",
                "status": "True",
                "reason": "Infeasible",
                "message": "a static policy",
            }
            conditions = [*(each for each in pod["status"]["conditions"] if each["type"] != refused["type"]), refused]
            self._client.patch(f"{_path(pod)}/status", {"status": {"conditions": conditions}})
        elif pod["status"].get("phase") == "Pending" or _resized(pod):
            ready = [{"type": "Ready", "status": "True"}]
            running = [{**_container(pod), "ready": True, "state": {"running": {}}}]
            status = {"phase": "Running", "conditions": ready, "containerStatuses": running}
            self._client.patch(f"{_path(pod)}/status", {"status": status})


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _container(pod: Json) -> Json:
    first = pod["spec"]["containers"][0]
    plain = {"name": first["name"], "image": first["image"], "imageID": "", "restartCount": 0}
    return {**plain, "resources": first["resources"]}


def _resized(pod: Json) -> bool:
    """Another size is asked for than it has."""
    statuses = pod["status"].get("containerStatuses") or ()
    asked = pod["spec"]["containers"][0]["resources"]
    return pod["status"].get("phase") == "Running" and any(each.get("resources") != asked for each in statuses)

"""What tells a machine that can't have a node from a fault of the node's."""

from __future__ import annotations

import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cluster.node.preflight import CONTROLLERS, gone, missing


def namespaces() -> bool:
    """Whether this process may have its own: root in a container often may not."""
    command = ["unshare", "--net", "--mount", "true"]
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def cgroups_v2(directory: Path, controllers: str) -> Path:
    (directory / "cgroup.controllers").write_text(controllers)
    (directory / "cgroup.subtree_control").touch()
    return directory


def test_the_controllers_that_are_missing_are_named(tmp_path: Path) -> None:
    assert list(missing({}, cgroups_v2(tmp_path, "cpu memory io"))) == [
        "cgroup controller cpuset",
        "cgroup controller pids",
    ]


def test_each_version_of_cgroups_has_its_own_files(tmp_path: Path) -> None:
    for name in CONTROLLERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    assert not list(missing({}, tmp_path))
    assert not list(missing({}, cgroups_v2(tmp_path, " ".join(CONTROLLERS))))


@pytest.mark.skipif(not namespaces(), reason="needs the right to make network and mount namespaces")
def test_a_feature_is_named_with_what_its_trial_says(tmp_path: Path) -> None:
    whole = cgroups_v2(tmp_path, " ".join(CONTROLLERS))
    trials = {"lunch": "echo no such device >&2; false", "devices": "test -r /proc/net/dev"}
    assert list(missing(trials, whole)) == ["lunch (no such device)"]


def test_a_pinned_package_that_the_mirror_has_no_more_is_named(tmp_path: Path) -> None:
    class Mirror(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/debian/here.deb" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    lock = tmp_path / "lock"
    lock.write_text("debian/here.deb 00\ndebian/old.deb 00\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (named,) = gone(lock, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert named.startswith("debian/old.deb of lock")
    assert "404" in named

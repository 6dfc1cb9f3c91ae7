"""A cluster of one real node, with Blink's images and model on it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from services.bootstrap.settings import DEFAULT_MODEL
from services.bootstrap.store.store import ModelStore
from tests.cluster.control_plane import Client, ControlPlane
from tests.cluster.node.images import archives
from tests.cluster.node.leftovers import PREFIX, clear, only_node
from tests.cluster.node.machine import Machine
from tests.cluster.node.network import HOST_ADDRESS, Network
from tests.cluster.node.release import Release

_HERE = Path(__file__).parent
TEST_SECONDS = 600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = "node" in config.option.markexpr and "PYTEST_XDIST_WORKER" not in os.environ
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.node)
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
            if not asked_for:
                item.add_marker(pytest.mark.skip("runs on a node of its own, as root: make test-node"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What an operator would look at, as it is when a test fails."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        seen = (each for each in item.funcargs.values() if isinstance(each, Release | Machine))
        report.sections += [(f"the {type(each).__name__.lower()}", told_by(each)) for each in seen]
    return report


def told_by(thing: Release | Machine) -> str:
    """Its diagnosis; what keeps it from giving one must not hide the test's own failure."""
    try:
        return thing.diagnosis()
    except Exception as error:
        return f"no diagnosis: {error!r}"


@pytest.fixture(scope="session")
def directory() -> Iterator[Path]:
    """Where the node keeps everything: not in pytest's, whose paths are too long for sockets."""
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def models(directory: Path) -> Path:
    """A folder that everybody may read, as a volume of the node's."""
    folder = directory / "models"
    folder.mkdir()
    directory.chmod(0o755)
    shutil.copy(ModelStore().resolve(DEFAULT_MODEL), folder)
    return folder


@pytest.fixture(scope="session")
def plane(directory: Path) -> Iterator[ControlPlane]:
    (directory / "plane").mkdir()
    with only_node():
        clear(but=directory)
        with Network(), ControlPlane(directory / "plane", {}, HOST_ADDRESS) as running:
            yield running


@pytest.fixture(scope="session")
def machine(plane: ControlPlane, directory: Path) -> Iterator[Machine]:
    images = archives()
    (directory / "node").mkdir()
    with Machine(plane, directory / "node") as running:
        for image in images:
            running.load(image)
        running.start_kubelet()
        yield running


@pytest.fixture(scope="session")
def client(plane: ControlPlane) -> Client:
    return plane.client()


@pytest.fixture(scope="session")
def release(plane: ControlPlane, machine: Machine, models: Path) -> Iterator[Release]:
    """The chart, installed with the profile cpu-demo."""
    made = Release(plane, models)
    made.install()
    yield made
    made.remove()

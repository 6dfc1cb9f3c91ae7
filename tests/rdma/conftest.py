"""Tests of the verbs transport over soft-RoCE.

Outside, their items are handed to an emulated machine, one for all of them, and its reports are shown as if they had
run here. Inside, they run, and vm/guest.py sends the reports.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rdma.lanes import Connect
from tests.rdma.vm.machine import run_tests
from tests.rdma.vm.packages import MachineUnavailableError

if TYPE_CHECKING:  # these need pyverbs, which only the emulated machine has
    from services.ring.verbs.device import Device
    from services.ring.verbs.transport import VerbsTransport
    from tests.rdma.sides import Forge, HostProcess

_HERE = Path(__file__).parent
_INSIDE = "BLINK_TESTS" in os.environ
_REPORTS = pytest.StashKey[dict[str, list[pytest.TestReport]]]()
_CONSOLE = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = "rdma" in config.option.markexpr and "PYTEST_XDIST_WORKER" not in os.environ
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.rdma)
            if not _INSIDE:  # the first of them waits for all; the machine has a limit of its own
                item.add_marker(pytest.mark.timeout(0))
            if not (_INSIDE or asked_for):
                item.add_marker(pytest.mark.skip("runs in an emulated machine: make test-rdma"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    # pytest asks this hook of every item of the session, whichever folder it lies in.
    if _INSIDE or not item.get_closest_marker("rdma") or item.get_closest_marker("skip"):
        return None
    stash = item.session.stash
    if _REPORTS not in stash:
        _run_all(item.session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = stash[_REPORTS].get(item.nodeid, [])
    if not any(report.when == "teardown" for report in reports):
        console, stash[_CONSOLE] = stash[_CONSOLE], "what the first such test shows"
        message = f"the emulated machine gave no report of this test; its end was\n{console}"
        reports = [*reports, pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_all(session: pytest.Session) -> None:
    tests = [item.nodeid for item in session.items if item.get_closest_marker("rdma")]
    by_test: dict[str, list[pytest.TestReport]] = defaultdict(list)
    try:
        serialized, console = run_tests(tests)
    except MachineUnavailableError as error:
        serialized, console = [], str(error)
    for data in serialized:
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=data)
        by_test[report.nodeid].append(report)
    session.stash[_REPORTS], session.stash[_CONSOLE] = by_test, console


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[HostProcess]]:
    """Two that start side by side, as each takes the emulated machine many seconds: one for all, one to be killed."""
    from tests.rdma.sides import HostProcess  # noqa: PLC0415

    processes = [HostProcess(), HostProcess()]
    yield processes
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def host(hosts: list[HostProcess], request: pytest.FixtureRequest) -> HostProcess:
    """Serves with the engine that the test's module names."""
    hosts[0].ask(do="serve", engine=request.module.ENGINE)
    return hosts[0]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    from services.ring.verbs.device import Device  # noqa: PLC0415

    opened = Device("rxe_dpu")
    yield opened
    opened.close()


@pytest.fixture
def connect(host: HostProcess, device: Device) -> Connect:
    from tests.rdma.sides import connection  # noqa: PLC0415

    def make(lane: int = 0, forge: Forge | None = None, **limits: int) -> AbstractContextManager[VerbsTransport]:
        return connection(host, device, lane, forge, **limits)

    return make

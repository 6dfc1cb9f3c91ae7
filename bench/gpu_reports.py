"""A pytest plugin: ``-p bench.gpu_reports --reports FILE [--share I/N]``.

Each test's beginning and end, and what pytest would print of a failure at the very end, go to FILE, one JSON object a
line and at once, so that what a killed process got done is known. With --share only the I-th (from 0) of N runs of
neighbouring tests is run: those of one module-scoped parameter stay together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WHY_LENGTH = 300


class Reporter:
    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._end(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._end(report, 0.0)

    def _end(self, report: pytest.TestReport | pytest.CollectReport, seconds: float) -> None:
        text = report.longreprtext if report.failed else ""
        self._write(test=report.nodeid, outcome=report.outcome, seconds=seconds, why=reason_of(report), text=text)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test failed or was skipped, in one line: where, and the assertion."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a skip
        return str(report.longrepr[2])[:WHY_LENGTH]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return " ".join(str(report.longrepr).split())[-WHY_LENGTH:]
    return f"{Path(crash.path).name}:{crash.lineno}: {' '.join(crash.message.split())}"[:WHY_LENGTH]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reports", type=Path, required=True)
    parser.addoption("--share", default="0/1")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config.getoption("--reports")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, shares = map(int, config.getoption("--share").split("/"))
    items[:] = items[len(items) * share // shares : len(items) * (share + 1) // shares]

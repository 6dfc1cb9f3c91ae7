"""Runs inside the emulated machine: pytest, with what is installed in the venv that started the machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


class ReportPort:
    """Writes every report, a line of JSON each, to the second serial port."""

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with Path("/dev/ttyS1").open("w") as port:
            port.write(json.dumps(data) + "\n")


def main() -> int:
    """0 when tests ran, whatever their outcome: their reports tell it."""
    os.chdir(REPOSITORY)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each import is slow here
    code = pytest.main(
        [
            "-c=tests/rdma/vm/pytest.ini",
            f"--rootdir={REPOSITORY}",
            "--confcutdir=tests/rdma",
            "--import-mode=importlib",
            *os.environ["BLINK_TESTS"].splitlines(),
        ],
        plugins=[ReportPort()],
    )
    return code not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_fault_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The server answers in spite of an exception that nobody meant; here it fails the test."""
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []

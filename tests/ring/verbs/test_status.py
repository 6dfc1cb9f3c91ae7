"""Errors of RDMA operations say what happened; no device is needed for that."""

from __future__ import annotations

import pytest

from services.ring.errors import TransportLostError
from services.ring.verbs.status import CompletionError, CompletionStatus


@pytest.mark.parametrize("status", [status for status in CompletionStatus if status is not CompletionStatus.SUCCESS])
def test_every_failure_is_named_and_ends_the_transport(status: CompletionStatus) -> None:
    error = CompletionError(int(status))
    assert isinstance(error, TransportLostError)
    assert error.status is status
    assert f"{status.name} (status {int(status)})" in str(error)


def test_a_status_of_a_newer_library_is_reported_by_its_number() -> None:
    error = CompletionError(99)
    assert error.status is None
    assert "unknown (status 99)" in str(error)

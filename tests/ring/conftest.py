from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def ring_path() -> Iterator[Path]:
    """A path in shared memory that no other test uses."""
    path = Path("/dev/shm") / f"blink-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)

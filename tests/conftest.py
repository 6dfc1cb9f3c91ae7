"""Fixtures of more than one package's tests."""

from __future__ import annotations

import pytest

from services.bootstrap.store import ModelStore
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.loader import open_checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct, where ``make model`` puts it."""
    return open_checkpoint(ModelStore().resolve("smollm2-135m-instruct"))

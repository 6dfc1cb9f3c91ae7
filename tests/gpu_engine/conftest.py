"""Fixtures of the engine's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.loader import open_checkpoint

DEFAULT_MODEL = Path.home() / ".cache" / "blink" / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct: from BLINK_MODEL_DIR, or where ``make model`` puts it."""
    path = Path(os.environ.get("BLINK_MODEL_DIR", DEFAULT_MODEL))
    if not path.exists():
        pytest.fail(f"{path} holds no model; run `make model` or set BLINK_MODEL_DIR")
    return open_checkpoint(path)

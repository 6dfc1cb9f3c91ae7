"""Fixtures of more than one package's tests."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from services.bootstrap.store import ModelStore
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.loader import open_checkpoint

hypothesis.settings.register_profile("blink", deadline=None)  # a busy machine is no fault of what is tested
hypothesis.settings.load_profile("blink")


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct, where ``make model`` puts it."""
    return open_checkpoint(ModelStore().resolve("smollm2-135m-instruct"))


@pytest.fixture(autouse=True)
def interruptible() -> None:
    """SIGINT and SIGTERM as a process finds them: a shell ignores SIGINT for background jobs, parking blocks both, and
    every process that a test starts would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

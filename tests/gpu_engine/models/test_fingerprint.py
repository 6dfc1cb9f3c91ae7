"""The fingerprint changes with anything that changes answers, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_hugging_face


def test_fingerprint_is_stable_and_sensitive(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)

    def fingerprint(folder: str) -> str:
        return open_checkpoint(tmp_path / folder).fingerprint

    write_hugging_face(tmp_path / "a", config, weights)
    write_hugging_face(tmp_path / "b", config, weights, shards=2)
    assert fingerprint("a") == fingerprint("b")
    assert len(fingerprint("a")) == 64
    write_hugging_face(tmp_path / "c", config, weights, rope_scaling={"type": "linear", "factor": 2.0})
    changed = {name: values.copy() for name, values in weights.items()}
    changed["layers.1.ffn.norm"][5] = np.nextafter(changed["layers.1.ffn.norm"][5], np.float32(9))
    write_hugging_face(tmp_path / "d", config, changed)
    write_hugging_face(tmp_path / "e", config, random_weights(config, seed=1))
    write_hugging_face(tmp_path / "f", config, weights)
    tokenizer = tmp_path / "f" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert len({fingerprint(folder) for folder in "acdef"}) == 5

"""Hugging Face folders of any geometry with random bf16 weights and a tokenizer that has a text for every id.

What is in them is noise, but of the sizes, layout and arithmetic of a real checkpoint, and the whole product serves it:
for measurements at the geometry of models whose weights are not at hand.
"""

from __future__ import annotations

import json
import shutil
import string
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import tensors_of
from services.gpu_engine.models.safetensors_checkpoint import INDEX
from services.gpu_engine.models.tokenizer import byte_alphabet
from tests.gpu_engine.models.tiny import hugging_face_config

SHARDS = 4  # as Llama-3-8B is published; a thread writes each
TILE = 1 << 24  # random values; every tensor is cut from it at a place of its own
SPECIAL = ("<|start|>", "<|end|>")
SPACE = "Ġ"  # a space before a word in the byte alphabet
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{{ '<|start|>assistant\n' }}"
)


def folder_bytes(config: ModelConfig) -> int:
    """Of the weights that ``write_checkpoint`` writes."""
    return 2 * sum(int(np.prod(shape)) for shape in _shapes(config).values())


def roomy_folder(needed: int) -> Path:
    """A new folder in shared memory if ``needed`` bytes and a quarter more are free there, else on disk."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and shutil.disk_usage(shared).free > needed * 5 // 4
    return Path(tempfile.mkdtemp(prefix="blink-weights-", dir=shared if fits else None))


def write_checkpoint(folder: Path, config: ModelConfig, shards: int = SHARDS) -> None:
    """Matrices are normal with a standard deviation of 1 / sqrt(inputs), so that activations keep their size through
    the layers; norms are 1. The weights differ from call to call.

    Raises ValueError for a vocabulary below the bytes, OSError where there is no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(config.vocabulary)))
    words = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    shapes = list(_shapes(config).items())
    names = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    parts = {name: dict(shapes[index::shards]) for index, name in enumerate(names)}
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    values = np.random.default_rng().standard_normal(TILE, np.float32)
    inputs = {shape[-1] for _, shape in shapes if len(shape) > 1}
    tiles = {count: to_bfloat16(values * np.float32(count**-0.5)) for count in inputs}
    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(lambda name: _write(folder / name, parts[name], tiles), names))


def tokenizer(vocabulary: int) -> dict[str, Any]:
    """A byte-level tokenizer.json of so many ids: special tokens, bytes, then ever longer words of small letters.

    Raises ValueError when that is fewer than the bytes need.
    """
    tokens = [*SPECIAL, *byte_alphabet()]
    if vocabulary < len(tokens):
        raise ValueError(f"vocabulary is {vocabulary}, a byte-level tokenizer has at least {len(tokens)} ids")
    words = list(islice(_words(), vocabulary - len(tokens)))
    known = {*tokens, *words}
    # Every split of a word makes it, not its first one alone: libraries that go by ids need not know the merges.
    splits = [[word[:place], word[place:]] for word in words for place in range(1, len(word))]
    merges = [split for split in splits if known.issuperset(split)]
    tokens += words
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": token} | flags for index, token in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges},
    }


def _words() -> Iterator[str]:
    """Words of two small letters or more, with a space before them or not, without end; shorter ones come first."""
    stems = [SPACE, *string.ascii_lowercase]
    for stem in stems:  # grows on the way
        for letter in string.ascii_lowercase:
            yield stem + letter
            stems.append(stem + letter)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of each tensor by its Hugging Face name."""
    layers = FAMILIES[config.architecture](config)
    return {spec.hugging_face: spec.stored_shape for spec in tensors_of(layers)}


def _write(path: Path, shapes: dict[str, tuple[int, ...]], tiles: dict[int, NDArray[np.uint16]]) -> None:
    """One safetensors file."""
    table, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    rng = np.random.default_rng()
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in shapes.values():
            tile = to_bfloat16(np.ones(shape[0], np.float32)) if len(shape) == 1 else tiles[shape[-1]]
            left, at = int(np.prod(shape)), 0 if len(shape) == 1 else int(rng.integers(tile.size))
            while left:
                written = file.write(tile[at : at + left].data.cast("B")) // 2
                left, at = left - written, (at + written) % tile.size

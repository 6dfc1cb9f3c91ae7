"""From a Hugging Face folder on disk to READY: ``python -m bench.start [--folder FOLDER]``.

The folder is made when it is not there: Llama-3-8B's geometry with random bf16 weights in shards, as published
checkpoints are. It was then just written, so its pages are in the cache. Two starts: the first
compiles kernels and chooses products unless earlier starts have, the second finds all of that kept. The log's lines
``products_chosen`` and ``loaded`` say how long each phase took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench.cuda_engine import LIMITS, first_token_ms
from bench.families import MODELS
from bench.random_checkpoint import write_checkpoint
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu.model_serving import serving_model

MODEL = MODELS["llama3-8b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "blink-llama3-8b")
    folder: Path = parser.parse_args().folder
    if not (folder / "config.json").exists():
        began = time.perf_counter()
        write_checkpoint(folder, MODEL)
        print(f"made {folder} in {time.perf_counter() - began:.1f} s", flush=True)
    shards = sorted(folder.glob("*.safetensors"))
    print(f"{len(shards)} shards, {sum(shard.stat().st_size for shard in shards) / 1e9:.2f} GB", flush=True)
    for start in ("first", "second"):
        began = time.perf_counter()
        with serving_model(open_checkpoint(folder), LIMITS) as client:
            seconds = time.perf_counter() - began
            print(
                f"{start} start to READY: {seconds:.2f} s, first token of 50 {first_token_ms(client, 50):.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""From a Hugging Face folder on disk to READY: ``python -m bench.start [--folder FOLDER]``.

The folder is made when it is not there: Llama-3-8B's geometry with random bf16 weights, written by transformers in
shards, as published checkpoints are. It was then just written, so its pages are in the cache. Two starts: the first
compiles kernels and chooses products unless earlier starts have, the second finds all of that kept.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.cuda_engine import LIMITS, first_token_ms
from bench.families import MODELS
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu.model_serving import serving_model

MODEL = MODELS["llama3-8b"]


def make(folder: Path) -> None:
    torch: Any = importlib.import_module("torch")  # of the machine, only to make the folder
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=MODEL.vocabulary,
        hidden_size=MODEL.hidden,
        intermediate_size=MODEL.ffn,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=MODEL.heads,
        num_key_value_heads=MODEL.kv_heads,
        max_position_embeddings=MODEL.context,
        rms_norm_eps=MODEL.norm_eps,
        rope_theta=MODEL.rope_base,
        eos_token_id=list(MODEL.eos_ids),
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="5GB")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')  # the engine does not tokenize
    del model
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "blink-llama3-8b")
    folder: Path = parser.parse_args().folder
    if not (folder / "config.json").exists():
        began = time.perf_counter()
        make(folder)
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

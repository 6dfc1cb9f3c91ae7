"""What FP8 costs in accuracy: weights, KV cache and both beside neither, on the cpu engine.

For SmolLM2-135M-Instruct, or another checkpoint: how many clear greedy tokens of the reference (goldens.json, by
transformers in float32, each after the reference's own tokens) stay the same, the perplexity of texts of this
repository, and how far the distribution of the next token moves (Kullback-Leibler divergence, mean over positions).

    python -m bench.fp8_accuracy [--model NAME] [--tokens 512]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from services.bootstrap.store import ModelStore
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.fp8_weights import Fp8Weights
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu_engine.cpu.executor import Executor

ROOT = Path(__file__).parents[1]
GOLDENS = json.loads((ROOT / "tests/gpu_engine/cpu/goldens.json").read_text())["goldens"]
CLEAR_MARGIN = 0.05  # between the two largest logits; nearer ones may change places between correct programs
TEXTS = ("LICENSE", "docs/architecture.md", "docs/decisions/0006-numerics-of-the-cpu-engine.md")


@dataclass(frozen=True)
class Result:
    same: int
    clear: int
    log_probabilities: NDArray[np.float64]  # [texts, positions, vocabulary]
    losses: NDArray[np.float64]  # [texts, positions]


def measure(checkpoint: Checkpoint, texts: list[list[int]], *, fp8_kv: bool) -> Result:
    clear = same = 0
    executor = Executor(checkpoint, threads=2, sequences=len(GOLDENS), context=512, fp8_kv=fp8_kv)
    logits = executor.run({index: golden["prompt"] for index, golden in enumerate(GOLDENS)})
    for position in range(len(GOLDENS[0]["tokens"])):
        for index, golden in enumerate(GOLDENS):
            if golden["margins"][position] > CLEAR_MARGIN:
                clear += 1
                same += int(logits[index].argmax()) == golden["tokens"][position]
        logits = executor.run({index: [golden["tokens"][position]] for index, golden in enumerate(GOLDENS)})
    executor = Executor(checkpoint, threads=2, sequences=len(texts), context=len(texts[0]), fp8_kv=fp8_kv)
    steps = [executor.run({index: [text[at]] for index, text in enumerate(texts)}) for at in range(len(texts[0]) - 1)]
    values = np.stack(steps, axis=1).astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    following = np.array([text[1:] for text in texts])
    return Result(same, clear, values, -np.take_along_axis(values, following[..., None], axis=-1)[..., 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    options = parser.parse_args()
    checkpoint = open_checkpoint(ModelStore().resolve(options.model))
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer.json.decode())
    texts = [tokenizer.encode((ROOT / name).read_text()).ids for name in TEXTS]
    texts = [text[: min(options.tokens, *map(len, texts))] for text in texts]
    print(f"{options.model}; {len(texts[0])} tokens each of {', '.join(TEXTS)}")
    print(f"{'weights, KV cache':<20} {'clear tokens':>14} {'perplexity':>30} {'KL, nats':>10}")
    plain: Result | None = None
    for weights in ("as stored", "fp8"):
        model = Fp8Weights(checkpoint) if weights == "fp8" else checkpoint
        for kv_cache in ("float32", "fp8"):
            result = measure(model, texts, fp8_kv=kv_cache == "fp8")
            plain = plain or result
            moved = np.exp(plain.log_probabilities) * (plain.log_probabilities - result.log_probabilities)
            each = "  ".join(f"{np.exp(losses.mean()):8.3f}" for losses in result.losses)
            kept = f"{result.same} of {result.clear}"
            print(f"{weights + ', ' + kv_cache:<20} {kept:>14} {each:>30} {moved.sum(-1).mean():10.5f}", flush=True)


if __name__ == "__main__":
    main()

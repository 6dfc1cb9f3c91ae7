"""Write goldens.json: greedy tokens of SmolLM2-135M-Instruct by an independent fp32 implementation.

Needs torch and transformers, which nothing else here does; run it in an environment of its own:

    pip install torch transformers accelerate gguf
    python tests/gpu_engine/cpu/make_goldens.py ~/.cache/blink/models/smollm2-135m-instruct/*.gguf

transformers dequantizes the same GGUF file to float32 and runs its own model code over it, without a KV cache.
Each token is stored with the margin between the two largest logits: below 0.05 two correct fp32 programs may differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 32
QUESTIONS = [
    "Explain in two sentences why the sky is blue.",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of copper.",
    "How do I reverse a list in Python?",
    "Summarize: " + "The quick brown fox jumps over the lazy dog near the river bank. " * 24,
]
TEXTS = [
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Größe, café, naïve: words with",
    "In 1969, ",
]


def main(path: Path) -> None:
    import torch  # type: ignore[import-not-found]  # noqa: PLC0415
    import transformers  # type: ignore[import-not-found]  # noqa: PLC0415

    options: dict[str, Any] = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    goldens = []
    for prompt in prompts:
        tokens: list[int] = []
        margins: list[float] = []
        with torch.no_grad():
            for _ in range(TOKENS):
                logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
                best = torch.topk(logits, 2)
                tokens.append(int(best.indices[0]))
                margins.append(round(float(best.values[0] - best.values[1]), 5))
        goldens.append({"prompt": prompt, "tokens": tokens, "margins": margins})
        print(len(prompt), min(margins), repr(tokenizer.decode(tokens)))
    note = f"transformers {transformers.__version__}, torch {torch.__version__}, float32; see make_goldens.py"
    lines = ",\n".join(json.dumps(golden) for golden in goldens)
    output = Path(__file__).with_name("goldens.json")
    output.write_text(f'{{"made_by": {json.dumps(note)}, "goldens": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))

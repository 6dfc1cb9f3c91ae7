"""Write family_goldens.json: logits and greedy tokens of tiny random models of each family by transformers in float32.

Needs torch and transformers, which nothing else here does; run it in an environment of its own:

    pip install torch transformers gguf
    python -m tests.gpu_engine.cpu.make_family_goldens

Weights and prompts follow from seeds, so the file holds results alone: of each variant the logits of the prompt's last
token, then TOKENS greedy ones with the margin between the two largest logits; of LongRoPE also the logits within the
original context.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from services.gpu_engine.models.config import LongRopeScaling
from tests.gpu_engine.models.tiny import random_weights, write_hugging_face
from tests.gpu_engine.models.variants import ORIGINAL_CONTEXT, VARIANTS

PROMPT, TOKENS = 90, 24
OUTPUT = Path(__file__).with_name("family_goldens.json")


def prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, 250, PROMPT)]


def main() -> None:
    import torch  # type: ignore[import-not-found]  # noqa: PLC0415
    import transformers  # type: ignore[import-not-found]  # noqa: PLC0415

    goldens = {}
    for name, (config, changes) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_hugging_face(Path(folder), config, random_weights(config), **changes)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        assert not info["missing_keys"], info
        assert not info["unexpected_keys"], info
        first: list[float] = []
        tokens: list[int] = []
        margins: list[float] = []
        with torch.no_grad():
            for _ in range(TOKENS):
                logits = model(torch.tensor([prompt() + tokens]), use_cache=False).logits[0, -1]
                first = first or [round(float(value), 5) for value in logits]
                best = torch.topk(logits, 2)
                tokens.append(int(best.indices[0]))
                margins.append(round(float(best.values[0] - best.values[1]), 5))
            within = model(torch.tensor([prompt()[: ORIGINAL_CONTEXT - 1]]), use_cache=False).logits[0, -1]
        goldens[name] = {"logits": first, "tokens": tokens, "margins": margins}
        if isinstance(config.rope_scaling, LongRopeScaling):
            goldens[name]["short_logits"] = [round(float(value), 5) for value in within]
        print(name, model.__class__.__name__, min(margins))
    note = f"transformers {transformers.__version__}, torch {torch.__version__}, float32; see make_family_goldens.py"
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(golden)}" for name, golden in goldens.items())
    OUTPUT.write_text(f'{{"made_by": {json.dumps(note)}, "goldens": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()

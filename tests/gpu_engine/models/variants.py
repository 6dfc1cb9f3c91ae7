"""One tiny model of each way in which the families differ, with what its config.json says beside the numbers."""

from __future__ import annotations

from typing import Any

from services.gpu_engine.models.config import LongRopeScaling, MixtureConfig, ModelConfig
from services.gpu_engine.models.rope import longrope_attention_factor
from tests.gpu_engine.models.tiny import tiny_config

ORIGINAL_CONTEXT = 64
LONG_ROPE = LongRopeScaling(
    short=tuple(1.0 + 0.05 * pair for pair in range(12)),
    long=tuple(1.0 + 0.9 * pair for pair in range(12)),
    original_context=ORIGINAL_CONTEXT,
    attention_factor=longrope_attention_factor(256 / ORIGINAL_CONTEXT, ORIGINAL_CONTEXT),
)

VARIANTS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "phi4": (tiny_config(architecture="phi3", heads=8, kv_heads=2), {"sliding_window": None}),
    "phi4-mini": (
        tiny_config(
            architecture="phi3",
            hidden=128,
            head_dim=32,
            partial_rotary=0.75,
            tied_embeddings=True,
            rope_scaling=LONG_ROPE,
        ),
        {"sliding_window": 262144},
    ),
    "qwen3": (
        tiny_config(architecture="qwen3", head_dim=32, heads=8, kv_heads=1, rope_base=1e6),
        {"sliding_window": None, "use_sliding_window": False, "attention_bias": False},
    ),
    "qwen3 tied": (tiny_config(architecture="qwen3", tied_embeddings=True), {}),
    "qwen3-moe": (
        tiny_config(architecture="qwen3_moe", head_dim=32, mixture=MixtureConfig(16, 4, 48, normalized=True)),
        {"decoder_sparse_step": 1},
    ),
    "qwen3-moe, some layers dense": (
        tiny_config(
            architecture="qwen3_moe",
            layers=4,
            mixture=MixtureConfig(8, 3, 32, normalized=False, dense_layers=(0, 1, 2)),
        ),
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
}

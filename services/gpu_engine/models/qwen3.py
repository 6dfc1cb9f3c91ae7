"""The Qwen3 family, dense and mixture of experts (arXiv 2505.09388): queries and keys normed per head before rope."""

from __future__ import annotations

from dataclasses import replace

from services.gpu_engine.models import decoder
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Attention, Expert, FeedForward, Layer, Mixture, TensorSpec


def qwen3(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of a dense Qwen3 model."""
    return decoder.decoder(config, _attention)


def qwen3_moe(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of a Qwen3 model with mixtures of experts in all but ``config.mixture.dense_layers``."""
    return decoder.decoder(config, _attention, _mixture)


def _attention(config: ModelConfig, index: int) -> Attention:
    ours, gguf, hf = f"layers.{index}.attention", f"blk.{index}.attn", f"model.layers.{index}.self_attn"
    width = (config.head_dim,)
    return replace(
        decoder.attention(config, index),
        query_norm=TensorSpec(f"{ours}.query_norm", width, f"{gguf}_q_norm.weight", f"{hf}.q_norm.weight"),
        key_norm=TensorSpec(f"{ours}.key_norm", width, f"{gguf}_k_norm.weight", f"{hf}.k_norm.weight"),
    )


def _mixture(config: ModelConfig, index: int) -> FeedForward | Mixture:
    mixture = config.mixture
    if mixture is None or index in mixture.dense_layers:
        return decoder.feed_forward(config, index)
    ours, hf = f"layers.{index}.ffn", f"model.layers.{index}"
    router = TensorSpec(
        f"{ours}.router", (mixture.experts, config.hidden), f"blk.{index}.ffn_gate_inp.weight", f"{hf}.mlp.gate.weight"
    )

    def expert(number: int) -> Expert:
        def matrix(name: str, outputs: int, inputs: int) -> TensorSpec:
            stored = f"{hf}.mlp.experts.{number}.{name}_proj.weight"
            return TensorSpec(f"{ours}.experts.{number}.{name}", (outputs, inputs), "", stored)

        hidden, ffn = config.hidden, mixture.ffn
        return Expert(matrix("gate", ffn, hidden), matrix("up", ffn, hidden), matrix("down", hidden, ffn))

    norm = decoder.feed_forward(config, index).norm
    return Mixture(norm, router, tuple(expert(number) for number in range(mixture.experts)))

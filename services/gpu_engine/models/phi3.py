"""The Phi-3 family, Phi-4 included (arXiv 2404.14219, 2412.08905): a Llama whose matrices are stored fused.

``qkv_proj`` holds query, key and value one below the other, ``gate_up_proj`` gate and up. A part of each head may stay
unrotated (``config.rotary_dim``).
"""

from __future__ import annotations

from dataclasses import replace

from services.gpu_engine.models import decoder
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Attention, FeedForward, Layer, TensorSpec


def phi3(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of a Phi-3 or Phi-4 model."""
    return decoder.decoder(config, _attention, _feed_forward)


def _attention(config: ModelConfig, index: int) -> Attention:
    plain = decoder.attention(config, index)
    query, key, value = _fused(f"model.layers.{index}.self_attn.qkv_proj.weight", plain.query, plain.key, plain.value)
    return replace(plain, query=query, key=key, value=value)


def _feed_forward(config: ModelConfig, index: int) -> FeedForward:
    plain = decoder.feed_forward(config, index)
    gate, up = _fused(f"model.layers.{index}.mlp.gate_up_proj.weight", plain.gate, plain.up)
    return replace(plain, gate=gate, up=up)


def _fused(stored: str, *parts: TensorSpec) -> list[TensorSpec]:
    """The parts as consecutive rows of one stored tensor."""
    total = sum(part.shape[0] for part in parts)
    found, row = [], 0
    for part in parts:
        found.append(replace(part, hugging_face=stored, first_row=row, stored_rows=total))
        row += part.shape[0]
    return found

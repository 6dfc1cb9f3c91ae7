"""The frame that all families share: pre-norm decoder layers of rotary grouped-query attention and SwiGLU.

arXiv 2302.13971, 2407.21783. A family says how its attention and its feed-forward part differ from the plain ones here.
"""

from __future__ import annotations

from collections.abc import Callable

from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head, Layer, Mixture, TensorSpec


def attention(config: ModelConfig, index: int) -> Attention:
    """Attention with its four matrices stored apart."""
    ours, gguf, hf = f"layers.{index}.attention", f"blk.{index}.attn", f"model.layers.{index}"
    hidden, query, kv = config.hidden, config.query_width, config.kv_width
    return Attention(
        index,
        TensorSpec(f"{ours}.norm", (hidden,), f"{gguf}_norm.weight", f"{hf}.input_layernorm.weight"),
        TensorSpec(f"{ours}.query", (query, hidden), f"{gguf}_q.weight", f"{hf}.self_attn.q_proj.weight", config.heads),
        TensorSpec(f"{ours}.key", (kv, hidden), f"{gguf}_k.weight", f"{hf}.self_attn.k_proj.weight", config.kv_heads),
        TensorSpec(f"{ours}.value", (kv, hidden), f"{gguf}_v.weight", f"{hf}.self_attn.v_proj.weight"),
        TensorSpec(f"{ours}.output", (hidden, query), f"{gguf}_output.weight", f"{hf}.self_attn.o_proj.weight"),
    )


def feed_forward(config: ModelConfig, index: int) -> FeedForward:
    """SwiGLU with its three matrices stored apart."""
    ours, gguf, hf = f"layers.{index}.ffn", f"blk.{index}.ffn", f"model.layers.{index}"
    hidden, ffn = config.hidden, config.ffn
    return FeedForward(
        TensorSpec(f"{ours}.norm", (hidden,), f"{gguf}_norm.weight", f"{hf}.post_attention_layernorm.weight"),
        TensorSpec(f"{ours}.gate", (ffn, hidden), f"{gguf}_gate.weight", f"{hf}.mlp.gate_proj.weight"),
        TensorSpec(f"{ours}.up", (ffn, hidden), f"{gguf}_up.weight", f"{hf}.mlp.up_proj.weight"),
        TensorSpec(f"{ours}.down", (hidden, ffn), f"{gguf}_down.weight", f"{hf}.mlp.down_proj.weight"),
    )


def decoder(
    config: ModelConfig,
    attention: Callable[[ModelConfig, int], Attention] = attention,
    feed_forward: Callable[[ModelConfig, int], FeedForward | Mixture] = feed_forward,
) -> tuple[Layer, ...]:
    """Embedding, ``config.layers`` times attention and feed-forward, head."""
    embedding = TensorSpec(
        "embedding", (config.vocabulary, config.hidden), "token_embd.weight", "model.embed_tokens.weight"
    )
    head = TensorSpec("head", (config.vocabulary, config.hidden), "output.weight", "lm_head.weight")
    layers: list[Layer] = [Embedding(embedding)]
    for index in range(config.layers):
        layers += [attention(config, index), feed_forward(config, index)]
    norm = TensorSpec("norm", (config.hidden,), "output_norm.weight", "model.norm.weight")
    layers.append(Head(norm, embedding if config.tied_embeddings else head))
    return tuple(layers)

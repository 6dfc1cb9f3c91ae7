"""The Llama family: the plain decoder (arXiv 2302.13971, 2407.21783)."""

from __future__ import annotations

from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.decoder import decoder
from services.gpu_engine.models.family import Layer


def llama(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of a Llama model, with their tensors' GGUF and Hugging Face names."""
    return decoder(config)

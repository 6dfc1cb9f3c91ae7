"""The model card: all that a gateway needs to know of a checkpoint."""

from __future__ import annotations

from blink.v1 import bootstrap_pb2

from services.gpu_engine.models.checkpoint import Checkpoint


def model_card(name: str, checkpoint: Checkpoint) -> bootstrap_pb2.ModelCard:
    """Describe a checkpoint under the name that it is served as."""
    tokenizer = checkpoint.tokenizer
    return bootstrap_pb2.ModelCard(
        name=name,
        architecture=checkpoint.config.architecture,
        fingerprint=checkpoint.fingerprint,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=checkpoint.config.eos_ids,
        unencodable_bytes=tokenizer.unencodable_bytes,
    )

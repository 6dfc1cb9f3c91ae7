"""The numbers that define a decoder-only transformer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from services.gpu_engine.models.errors import CorruptCheckpointError

MAX_SIZE = (1 << 31) - 1  # of one dimension
MAX_LAYERS = 4096  # layers are described one by one before a tensor is looked for, so a damaged count must not pass
MAX_EXPERTS = 4096  # likewise


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). ``attention_factor`` multiplies the rotated queries and keys."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class FrequencyFactors:
    """GGUF's ``rope_freqs.weight``: frequency i is divided by ``factors[i]``."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): frequency i divided by ``short[i]``, or by ``long[i]`` beyond the original context.

    ``attention_factor`` multiplies the rotated queries and keys in either case.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | LongRopeScaling


@dataclass(frozen=True)
class MixtureConfig:
    """Mixture-of-experts layers.

    Attributes:
        experts: of each such layer.
        per_token: how many of them a token goes through.
        ffn: width of one expert.
        normalized: whether the weights of a token's experts are divided by their sum.
        dense_layers: indices of the layers that have a plain feed-forward part.
    """

    experts: int
    per_token: int
    ffn: int
    normalized: bool
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("experts", self.experts, MAX_EXPERTS),
            ("experts per token", self.per_token, self.experts),
            ("expert ffn", self.ffn, MAX_SIZE),
        ):
            if not 1 <= value <= limit:
                raise CorruptCheckpointError(f"model {name} is {value}, must be 1 to {limit}")


@dataclass(frozen=True)
class ModelConfig:
    """A model's geometry and constants.

    Rotary pairs are (i, i + rotary_dim / 2), as in Hugging Face checkpoints; readers bring others into that order. What
    lies beyond the first ``rotary_dim`` dimensions of a head is not rotated.

    Raises:
        CorruptCheckpointError: a value is out of range or two contradict each other.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    partial_rotary: float = 1.0
    mixture: MixtureConfig | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "context"):
            value, limit = getattr(self, name), MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= value <= limit:
                raise CorruptCheckpointError(f"model {name} is {value}, must be 1 to {limit}")
        if self.heads % self.kv_heads:
            raise CorruptCheckpointError(f"model heads is {self.heads}, must be a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise CorruptCheckpointError(f"model head_dim is {self.head_dim}, must be even")
        if not 0 < self.partial_rotary <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise CorruptCheckpointError(
                f"model partial_rotary is {self.partial_rotary}, {self.rotary_dim} of head_dim {self.head_dim}"
                " dimensions: must be an even number of them, at least 2"
            )
        if isinstance(self.rope_scaling, LongRopeScaling):
            for name in ("short", "long"):
                if (count := len(getattr(self.rope_scaling, name))) != self.rotary_dim // 2:
                    raise CorruptCheckpointError(
                        f"model has {count} {name} factors of LongRoPE, must be {self.rotary_dim // 2}"
                    )
        if not self.norm_eps > 0:
            raise CorruptCheckpointError(f"model norm_eps is {self.norm_eps}, must be above 0")
        if not self.rope_base > 1:
            raise CorruptCheckpointError(f"model rope_base is {self.rope_base}, must be above 1")
        for token in self.eos_ids:
            if not 0 <= token < self.vocabulary:
                raise CorruptCheckpointError(f"model eos id is {token}, must be below vocabulary {self.vocabulary}")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def as_dict(self) -> dict[str, object]:
        """Plain values, for the fingerprint and logs; the scaling's kind is kept beside its numbers."""
        values = dataclasses.asdict(self)
        values["rope_scaling_kind"] = type(self.rope_scaling).__name__ if self.rope_scaling else "none"
        return values

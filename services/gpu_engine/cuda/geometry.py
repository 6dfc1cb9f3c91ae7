"""What the kernels are built for: a model's shape and the size of a KV page, as preprocessor constants."""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_engine.cuda.errors import UnsupportedGeometryError
from services.gpu_engine.engine import Precision
from services.gpu_engine.models.config import ModelConfig

HEAD_DIMS = (64, 128)
MAX_GROUP = 8  # query heads that share a KV head
MAX_CHOSEN = 32  # experts of a token
BF16_BYTES = 2
CACHE_BYTES: dict[Precision, int] = {"bf16": BF16_BYTES, "fp8": 1}


@dataclass(frozen=True)
class Geometry:
    """A model's shape with the page size and the precision of its KV cache.

    The cache is [layer][page][key, value][kv_head][page_size][head_dim]: one head's keys of a page are contiguous, so
    decode reads long runs, and a page is one box for a bulk copy.

    Raises:
        UnsupportedGeometryError: naming the number that the kernels don't support.
    """

    config: ModelConfig
    page_size: int = 16
    kv_cache: Precision = "bf16"

    def __post_init__(self) -> None:
        config = self.config
        group = config.heads // config.kv_heads
        checks: tuple[tuple[str, int, bool, str], ...] = (
            ("rotary_dim", config.rotary_dim, config.rotary_dim % 16 == 0, "a multiple of 16"),
            ("head_dim", config.head_dim, config.head_dim in HEAD_DIMS, f"one of {HEAD_DIMS}"),
            ("heads per KV head", group, 1 <= group <= MAX_GROUP, f"1 to {MAX_GROUP}"),
            ("hidden", config.hidden, config.hidden % 8 == 0, "a multiple of 8"),
            ("ffn", config.ffn, config.ffn % 8 == 0, "a multiple of 8"),
            ("page_size", self.page_size, self.page_size in (16, 32, 64, 128), "16, 32, 64 or 128"),
        )
        if mixture := config.mixture:
            checks += (
                ("hidden", config.hidden, config.hidden % 256 == 0, "a multiple of 256 in mixtures"),
                ("experts", mixture.experts, mixture.experts % 16 == 0 and mixture.experts <= 256, "16, 32, ... 256"),
                ("experts per token", mixture.per_token, mixture.per_token <= MAX_CHOSEN, f"1 to {MAX_CHOSEN}"),
                ("expert ffn", mixture.ffn, mixture.ffn % 64 == 0, "a multiple of 64"),
            )
        for name, value, good, limit in checks:
            if not good:
                raise UnsupportedGeometryError(f"{name} is {value}, the CUDA kernels support {limit}")

    @property
    def group(self) -> int:
        return self.config.heads // self.config.kv_heads

    @property
    def score_scale(self) -> float:
        """Of attention's scores, in powers of two: exp(x) = 2^(x log2 e)."""
        return float(self.config.head_dim**-0.5) * 1.4426950408889634

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: queries, keys, values."""
        return self.config.query_width + 2 * self.config.kv_width

    @property
    def key_bytes(self) -> int:
        """Bytes of a key, or a value, of one KV head in the cache."""
        return self.config.head_dim * CACHE_BYTES[self.kv_cache]

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return 2 * self.config.kv_heads * self.page_size * self.key_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.config.layers * self.layer_page_bytes

    def defines(self) -> dict[str, int]:
        config, mixture = self.config, self.config.mixture
        defines = {
            "BLINK_HIDDEN": config.hidden,
            "BLINK_FFN": config.ffn,
            "BLINK_HEADS": config.heads,
            "BLINK_KV_HEADS": config.kv_heads,
            "BLINK_HEAD_DIM": config.head_dim,
            "BLINK_ROTARY_DIM": config.rotary_dim,
            "BLINK_PAGE_SIZE": self.page_size,
            "BLINK_FP8_CACHE": int(self.kv_cache == "fp8"),
        }
        if mixture:
            defines |= {
                "BLINK_EXPERTS": mixture.experts,
                "BLINK_CHOSEN": mixture.per_token,
                "BLINK_EXPERT_FFN": mixture.ffn,
            }
        return defines

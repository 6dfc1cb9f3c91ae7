"""What does not fit the GPU is refused before it is loaded, with its parts and what to lower."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="needs the CUDA libraries of blink[cuda]")

from services.gpu_engine.cuda.driver import Buffer, measuring
from services.gpu_engine.cuda.errors import OutOfDeviceMemoryError
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.memory_plan import memory_parts, require_device_memory
from services.gpu_engine.cuda.step_arrays import StepLimits
from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.config import MixtureConfig
from services.gpu_engine.models.llama import llama
from tests.gpu.steps import config

MODEL = config(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=128_256)
GEOMETRY = Geometry(MODEL)
LIMITS = StepLimits(tokens=2048, rows=256, pages_per_sequence=256)
CONTEXT = 4096


def parts(limits: StepLimits = LIMITS, pages: int = 8192) -> dict[str, int]:
    return memory_parts(llama(MODEL), GEOMETRY, limits, pages)


def test_the_parts_of_llama_3_8b_are_its_known_sizes() -> None:
    found = parts()
    assert found["weights"] == pytest.approx(16.06e9, rel=1e-3)  # 8.03 billion parameters of two bytes
    assert found["KV cache"] == 8192 * 16 * 131_072  # 128 KiB a token
    assert found["sampling"] == 4 * 256 * 128_256
    assert found["largest step"] > 2048 * (4 * 4096 + 2 * 3 * 14336) + 4 * 256 * 128_256


def test_a_cache_in_fp8_takes_half_and_changes_nothing_else() -> None:
    found = memory_parts(llama(MODEL), replace(GEOMETRY, kv_cache="fp8"), LIMITS, 8192)
    assert found == parts() | {"KV cache": parts()["KV cache"] // 2}


@pytest.mark.parametrize("lowered", [{"tokens": 1024}, {"rows": 128}])
def test_what_the_message_says_to_lower_does_lower_it(lowered: dict[str, int]) -> None:
    assert parts(replace(LIMITS, **lowered))["largest step"] < parts()["largest step"]


def test_what_fits_exactly_is_taken() -> None:
    require_device_memory(parts(), sum(parts().values()), GEOMETRY, CONTEXT)


def test_too_many_pages_are_refused_and_what_would_fit_is_named() -> None:
    free = sum(parts(pages=1000).values())
    with pytest.raises(OutOfDeviceMemoryError, match=r"KV cache 16,384.* lower kv_tokens to 16000, or") as caught:
        require_device_memory(parts(), free, GEOMETRY, CONTEXT)
    assert (caught.value.needed, caught.value.free) == (sum(parts().values()), free)


def test_a_step_too_large_names_what_makes_it_so() -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="lower max_batched_tokens, max_running and max_context_tokens"):
        require_device_memory(parts(), parts()["weights"], GEOMETRY, CONTEXT)


def test_measured_buffers_take_no_memory() -> None:
    with measuring() as found:
        buffer = Buffer(3 << 20)
        buffer.fill(0)
        Buffer(100)
    assert buffer.pointer == 0
    assert found == [4 << 20, 100]


def test_mixtures_count_with_what_lies_between_their_products() -> None:
    mixture = MixtureConfig(experts=128, per_token=8, ffn=768, normalized=True)
    model = config(architecture="qwen3_moe", layers=2, hidden=2048, heads=32, kv_heads=4, head_dim=128, mixture=mixture)
    dense = replace(model, architecture="qwen3", mixture=None)
    with_mixtures, without = (
        memory_parts(FAMILIES[each.architecture](each), Geometry(each), LIMITS, 100) for each in (model, dense)
    )
    between = 2 * 2048 * 8 * (768 + 2048)
    assert between < with_mixtures["largest step"] - without["largest step"] < 1.1 * between
    experts = 2 * 128 * 3 * 768 * 2048
    assert with_mixtures["weights"] > 2 * experts

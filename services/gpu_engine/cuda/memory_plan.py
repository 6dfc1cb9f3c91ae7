"""Proves before anything is loaded that a model with its KV cache and its largest step fits the GPU."""

from __future__ import annotations

from collections.abc import Collection

from services.gpu_engine.cuda.attention_work import AttentionWork
from services.gpu_engine.cuda.cublas_lt import WORKSPACE_BYTES
from services.gpu_engine.cuda.driver import measuring
from services.gpu_engine.cuda.errors import OutOfDeviceMemoryError
from services.gpu_engine.cuda.executor import Activations
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.mixture import MixtureMemory
from services.gpu_engine.cuda.sampler import marks_bytes
from services.gpu_engine.cuda.step_arrays import StepLimits
from services.gpu_engine.cuda.weights import scratch_bytes, weight_bytes
from services.gpu_engine.models.family import Layer

LIBRARY_BYTES = (512 << 20) + WORKSPACE_BYTES
"""Room for what only the driver knows: kernels, 113 MB of graphs for a model of 32 layers, cuBLASLt's own."""

KV_CACHE = "KV cache"


def memory_parts(
    layers: tuple[Layer, ...],
    geometry: Geometry,
    limits: StepLimits,
    pages: int,
    fp8: Collection[str] = frozenset(),
) -> dict[str, int]:
    """Bytes of device memory by what they are for, the control loop's own aside; ``fp8`` as of DeviceWeights."""
    with measuring() as step:
        Activations.allocate(geometry, limits)
        compared = max(step)  # a product's result, once more, while ways to compute it are compared
        AttentionWork(geometry, limits)
        if geometry.config.mixture:
            MixtureMemory(geometry.config, limits)
    return {
        "weights": weight_bytes(layers, fp8) + scratch_bytes(layers, fp8),
        KV_CACHE: pages * geometry.page_bytes,
        "largest step": sum(step),
        "choosing products": compared,
        "sampling": marks_bytes(geometry.config.vocabulary, limits.rows),
        "libraries and graphs": LIBRARY_BYTES,
    }


def require_device_memory(parts: dict[str, int], free: int, geometry: Geometry, context: int) -> None:
    """Refuse what can't fit.

    Args:
        parts: of ``memory_parts``.
        free: bytes.
        context: tokens that the KV cache must hold at least.

    Raises:
        OutOfDeviceMemoryError: naming every part, what is free, and what to lower.
    """
    needed = sum(parts.values())
    if needed <= free:
        return
    named = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items())
    left = (free - needed + parts[KV_CACHE]) // geometry.page_bytes * geometry.page_size
    if left >= context:
        advice = f"lower kv_tokens to {left}, or max_batched_tokens or max_running"
    else:
        advice = f"lower max_batched_tokens, max_running and max_context_tokens (one request needs {context} kv_tokens)"
    raise OutOfDeviceMemoryError(f"the engine ({named} MiB)", needed, free, advice)

"""A KV cache in FP8 on the GPU: the codes of keys and values, and the cpu engine's results with the same cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.executor import StepExecutor, rotary_table
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.kv_scales import CKvScales
from services.gpu_engine.cuda.step_arrays import HostStep, StepArrays, StepLimits
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.models.float8 import VALUES, to_e4m3
from services.gpu_engine.models.loader import open_checkpoint
from services.gpu_engine.models.rope import rotary_frequencies
from tests.gpu.steps import POISON, KernelBench, Rows, poisoned, relative_error
from tests.gpu_engine.cpu.executor import Executor
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_hugging_face

ROWS: list[Rows] = [[(0, 1)], [(0, 16), (31, 1), (17, 40)], [(15, 1), (16, 1), (0, 17)]]
SHAPES = [(4, 4, 64, 1.0), (8, 2, 128, 1.0), (10, 2, 128, 0.75), (10, 2, 64, 0.25)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "partial"), SHAPES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_rotary_writes_codes_and_leaves_queries_as_halves(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_dim: int,
    partial: float,
    page_size: int,
) -> None:
    """Keys become the nearest codes but for what float32 rounds; values, which nothing changes before, exactly."""
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "partial_rotary": partial}
    bench = KernelBench(device, compiler, rng, rows, page_size=page_size, kv_cache="fp8", **shape)
    model, step = bench.config, bench.step
    turns = Buffer.of(rotary_table(model, int(step.positions.max()) + 1))
    qkv, values = bench.random(bench.tokens, bench.geometry.qkv_width)
    pages = poisoned(bench.pages * bench.geometry.layer_page_bytes)
    bench.kernels.plan_attention(stream)
    bench.kernels.rotary(stream, bench.tokens + 5, qkv.pointer, pages.pointer, turns.pointer, scales=bench.scales)

    x = values.reshape(bench.tokens, heads + 2 * kv_heads, head_dim)
    angles = step.positions[:, None, None] * rotary_frequencies(model)[0]
    half = model.rotary_dim // 2
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles), rest], axis=-1
    )
    found = qkv.download(np.uint16, (bench.tokens, heads + 2 * kv_heads, head_dim)).view(np.float16)
    np.testing.assert_allclose(found[:, :heads].astype(np.float64), turned[:, :heads], rtol=2**-11, atol=1e-6)

    cache = pages.download(np.uint8, (bench.pages, 2, kv_heads, page_size, head_dim))
    token_row = np.repeat(np.arange(len(rows)), np.diff(step.row_start))
    page = step.page_table[step.sequence[token_row], step.positions // page_size]
    keys, stored = (cache[page, which, :, step.positions % page_size] for which in (0, 1))
    exact = turned[:, heads : heads + kv_heads] / bench.scales.key
    nearest = np.abs(VALUES[to_e4m3(exact.astype(np.float32))] - exact)
    assert (np.abs(VALUES[keys] - exact) <= nearest + 1e-5 * np.abs(exact) + 1e-6).all()
    expected = x[:, heads + kv_heads :].astype(np.float32) / np.float32(bench.scales.value)
    np.testing.assert_array_equal(stored, to_e4m3(expected))
    cache[page, :, :, step.positions % page_size] = POISON
    assert (cache == POISON).all(), "something else was written"


def test_values_of_all_kinds_become_the_codes_that_the_cpu_engine_rounds_to(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator
) -> None:
    """All bf16 patterns: halfway cases, subnormals, too large ones, infinity and NaN."""
    tokens = 1024
    bench = KernelBench(device, compiler, rng, [(0, tokens)], heads=4, kv_heads=1, head_dim=64, kv_cache="fp8")
    bits = np.zeros((tokens, bench.geometry.qkv_width), np.uint16)
    bits[:, -64:] = rng.permutation(1 << 16).reshape(tokens, 64).astype(np.uint16)
    turns, pages = (
        Buffer.of(rotary_table(bench.config, tokens)),
        poisoned(bench.pages * bench.geometry.layer_page_bytes),
    )
    for scale in (1.0, 0.25, 0.37, 3e-4):
        bench.kernels.plan_attention(stream)
        qkv = Buffer.of(bits)
        scales = CKvScales(1.0, scale)
        bench.kernels.rotary(stream, tokens, qkv.pointer, pages.pointer, turns.pointer, scales=scales)
        cache = pages.download(np.uint8, (bench.pages, 2, 1, 16, 64))
        positions = bench.step.positions
        found = cache[bench.step.page_table[bench.step.sequence[0], positions // 16], 1, 0, positions % 16]
        with np.errstate(over="ignore", invalid="ignore"):
            values = from_bfloat16(bits[:, -64:]) / np.float32(scale)
        number = ~np.isnan(values)
        np.testing.assert_array_equal(found[number], to_e4m3(values)[number])
        assert np.isnan(VALUES[found[~number]]).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (4, 1, 128)])
def test_logits_of_prompts_chunks_and_decode_steps_are_those_of_the_cpu_engine(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """By separate kernels and fused. Activations in bf16 make other codes of some keys and values; so the results need
    only be nearer to the cpu engine's with the same cache than those are to its own without rounding."""
    sequences, context = 5, 640
    model = tiny_config(
        layers=3, hidden=256, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=512, context=context
    )
    write_hugging_face(tmp_path, model, random_weights(model), "BF16")
    checkpoint = open_checkpoint(tmp_path)
    scales = [(0.05, 0.02), (1.0, 1.0), (0.011, 0.3)]
    monkeypatch.setattr(checkpoint, "kv_scales", scales.__getitem__)
    reference, unrounded = (
        Executor(checkpoint, threads=4, sequences=sequences, context=context, fp8_kv=fp8_kv) for fp8_kv in (True, False)
    )
    limits = StepLimits(1024, sequences, context // 16)
    arrays = StepArrays(limits)
    executor = StepExecutor(
        device,
        Geometry(checkpoint.config, 16, "fp8"),
        checkpoint.layers,
        DeviceWeights(checkpoint),
        step=arrays.addresses,
        limits=limits,
        pages=sequences * context // 16,
        compiler=compiler,
        kv_scales=scales,
    )
    executor.cache.fill(POISON)
    rng = np.random.default_rng(0)
    script = [
        {0: 17, 2: 300, 4: 128},
        {0: 1, 1: 130, 2: 200, 3: 2},
        {1: 64, 3: 1, 4: 1},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    ]
    script += script[-1:] * 3
    errors: list[float] = []
    effects: list[float] = []
    for index, counts in enumerate(script):
        rows = {sequence: rng.integers(0, model.vocabulary, count).tolist() for sequence, count in counts.items()}
        step = HostStep(**vars(reference.step(rows)))
        expected, without = reference.run(rows), unrounded.run(rows)
        arrays.upload(step)
        if executor.fused_rows and index % 2 and step.tokens == step.rows:
            executor.launch_decode(stream, step.rows)
        else:
            executor.launch(stream, step.tokens, step.samples)
        found = executor.activations.logits.download(np.float32, (limits.rows, model.vocabulary))[: step.samples]
        errors += map(relative_error, found, expected)
        effects += map(relative_error, without, expected)
    print(f"relative errors {np.round(errors, 4).tolist()}, of what rounding does {np.round(effects, 4).tolist()}")
    assert max(errors) < 8e-2
    assert np.linalg.norm(errors) < 0.85 * np.linalg.norm(effects)

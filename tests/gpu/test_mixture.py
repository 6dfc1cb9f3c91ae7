"""Mixture-of-experts layers against float64 NumPy: routing, grouped products in every shape, the weighted sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.mixture import SHAPES, WORK, MixtureKernels
from services.gpu_engine.models.config import MixtureConfig
from tests.gpu.steps import POISON, Floats, KernelBench, bfloat16_of, poisoned, relative_error

BF16_ERROR = 6e-3
POOL = 4_000_037  # random weights, repeated at steps at which no two experts begin alike
QWEN3_30B = MixtureConfig(experts=128, per_token=8, ffn=768, normalized=True)
SMALL = MixtureConfig(experts=16, per_token=3, ffn=64, normalized=False)
CASES = [
    (QWEN3_30B, 2048, 1),
    (QWEN3_30B, 2048, 33),
    (QWEN3_30B, 2048, 256),
    (SMALL, 256, 1),
    (SMALL, 256, 17),
    (SMALL, 256, 700),
    (MixtureConfig(experts=256, per_token=32, ffn=128, normalized=True), 512, 40),
]


class Layer:
    """Random weights of one layer and inputs of ``tokens`` tokens; ``alike`` tokens are all the same."""

    def __init__(
        self,
        device: Device,
        compiler: Compiler,
        rng: np.random.Generator,
        mixture: MixtureConfig,
        hidden: int,
        tokens: int,
        alike: bool = False,
    ) -> None:
        self.mixture, self.hidden, self.tokens = mixture, hidden, tokens
        self.bench = KernelBench(
            device, compiler, rng, [(0, tokens)], architecture="qwen3_moe", hidden=hidden, mixture=mixture
        )
        bench = self.bench
        self.kernels = MixtureKernels(bench.geometry, compiler, bench.arrays.addresses, bench.limits)
        for name in set(WORK) - {"arrivals"}:
            self.kernels.memory.work[name].fill(POISON)
        self.x, self.x_values = bench.random(tokens, hidden)
        if alike:
            self.x.upload(np.tile(self.x.download(np.uint16, (1, hidden)), (tokens, 1)))
            self.x_values = bfloat16_of(self.x, tokens, hidden)
        self.router, self.router_values = bench.random(mixture.experts, hidden, scale=hidden**-0.5)
        pool = to_bfloat16((rng.standard_normal(POOL) * hidden**-0.5).astype(np.float32))
        self.gate_up_bits = np.resize(pool, (mixture.experts, 2, mixture.ffn, hidden))
        self.down_bits = np.resize(pool, (mixture.experts, hidden, mixture.ffn))
        self.gate_up, self.down = Buffer.of(self.gate_up_bits), Buffer.of(self.down_bits)

    def run(self, stream: Stream, shape_name: str, tokens: int | None = None, x: int | None = None) -> Buffer:
        """Launch for ``tokens`` and a few more, as a graph of a larger bucket would be."""
        kernels, shape, count = self.kernels, self.kernels.shapes[shape_name], tokens or self.tokens
        bucket, x = min(count + 5, self.bench.limits.tokens), x or self.x.pointer
        self.bench.arrays.counts.upload(np.array([count, 1, 1], np.uint32))
        kernels.memory.activated.fill(POISON)
        kernels.memory.results.fill(POISON)
        out = poisoned(2 * (self.tokens + 5) * self.hidden)
        kernels.route(stream, bucket, x=x, router=self.router.pointer, shape=shape)
        kernels.gate_up(stream, bucket, x=x, weight=self.gate_up.pointer, shape=shape)
        kernels.down(stream, bucket, weight=self.down.pointer, shape=shape)
        kernels.combine(stream, bucket, out.pointer)
        stream.synchronize()
        return out

    def array(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        return self.kernels.memory.work[name].download(dtype, (self.tokens, self.mixture.per_token))

    def check_routing(self) -> tuple[NDArray[np.int32], Floats]:
        """Compare with float64; where two logits are as good as equal, either may have been chosen.

        Returns:
            The experts that were chosen and their exact weights, [tokens, per_token].
        """
        mixture = self.mixture
        logits = self.x_values @ self.router_values.T
        chosen = self.array("chosen", np.int32).astype(np.int32)
        assert ((chosen >= 0) & (chosen < mixture.experts)).all()
        picked = np.take_along_axis(logits, chosen.astype(np.int64), 1)
        assert all(len(set(row)) == mixture.per_token for row in chosen.tolist())
        np.testing.assert_allclose(picked, -np.sort(-logits, axis=1)[:, : mixture.per_token], rtol=0, atol=1e-4)
        exact = np.exp(logits - logits.max(1, keepdims=True))
        weights = np.take_along_axis(exact, chosen.astype(np.int64), 1)
        weights /= (weights if mixture.normalized else exact).sum(1, keepdims=True)
        np.testing.assert_allclose(self.array("weights", np.float32), weights, rtol=1e-4)
        places = self.array("places", np.int32).reshape(-1)
        tokens = np.repeat(np.arange(self.tokens), mixture.per_token)
        order = np.argsort(chosen.reshape(-1), kind="stable")
        np.testing.assert_array_equal(places[order], np.arange(places.size))
        np.testing.assert_array_equal(self.array("row_token", np.int32).reshape(-1), tokens[order])
        return chosen, weights

    def expected(self, chosen: NDArray[np.int32], weights: Floats) -> Floats:
        out = np.zeros((self.tokens, self.hidden))
        for expert in np.unique(chosen):
            token, choice = np.nonzero(chosen == expert)
            x, down = self.x_values[token], from_bfloat16(self.down_bits[expert]).astype(np.float64)
            gate, up = (x @ from_bfloat16(bits).astype(np.float64).T for bits in self.gate_up_bits[expert])
            results = (gate / (1 + np.exp(-gate)) * up) @ down.T
            np.add.at(out, token, weights[token, choice][:, None] * results)
        return out


@pytest.mark.parametrize(("mixture", "hidden", "tokens"), CASES)
def test_a_layer_in_every_shape(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    mixture: MixtureConfig,
    hidden: int,
    tokens: int,
) -> None:
    layer = Layer(device, compiler, rng, mixture, hidden, tokens)
    outs = []
    for shape in (*SHAPES, "medium"):  # again: the arrival counters must be back at zero
        out = layer.run(stream, shape)
        routing = layer.check_routing()
        outs.append(out.download(np.uint16, (tokens, hidden)))
        np.testing.assert_array_equal(outs[-1], outs[0], shape)
        assert np.isnan(bfloat16_of(out, tokens + 5, hidden)[tokens:]).all()
    assert relative_error(from_bfloat16(outs[0]), layer.expected(*routing)) < BF16_ERROR


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 63, 300])
def test_tokens_that_all_choose_the_same_experts(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, shape: str, tokens: int
) -> None:
    layer = Layer(device, compiler, rng, QWEN3_30B, 2048, tokens, alike=True)
    found = bfloat16_of(layer.run(stream, shape), tokens, 2048)
    assert relative_error(found, layer.expected(*layer.check_routing())) < BF16_ERROR
    assert (found == found[0]).all()


@pytest.mark.parametrize(("mixture", "hidden", "tokens"), CASES[:2] + CASES[4:])
def test_the_sum_joins_the_residual_stream_and_is_normed(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    mixture: MixtureConfig,
    hidden: int,
    tokens: int,
) -> None:
    layer = Layer(device, compiler, rng, mixture, hidden, tokens)
    total = layer.run(stream, "medium").download(np.uint16, (tokens, hidden))
    before = rng.standard_normal((tokens + 5, hidden)).astype(np.float32)
    residual, out = Buffer.of(before), poisoned(2 * (tokens + 5) * hidden)
    weight, factor = layer.bench.random(hidden)
    layer.kernels.combine_norm(stream, tokens + 5, residual=residual.pointer, weight=weight.pointer, out=out.pointer)
    expected = before[:tokens] + from_bfloat16(total).astype(np.float64)
    found = residual.download(np.float32, before.shape)
    np.testing.assert_allclose(found[:tokens], expected, rtol=0, atol=2**-8 * np.abs(from_bfloat16(total)).max())
    np.testing.assert_array_equal(found[tokens:], before[tokens:])
    exact = found[:tokens].astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(1, keepdims=True) + layer.bench.config.norm_eps) * factor
    rounded = bfloat16_of(out, tokens + 5, hidden)
    assert relative_error(rounded[:tokens], normed) < 4e-3
    assert np.isnan(rounded[tokens:]).all()


@pytest.mark.parametrize("tokens", [1, 30, 700])
def test_overlapping_launches_give_the_bits_of_launches_one_at_a_time(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, tokens: int
) -> None:
    layer, overlapping = Layer(device, compiler, rng, QWEN3_30B, 2048, tokens), Stream(overlap=True)
    for shape in SHAPES:
        expected = layer.run(stream, shape).download(np.uint16, (tokens, 2048))
        for _ in range(10):
            found = layer.run(overlapping, shape).download(np.uint16, (tokens, 2048))
            np.testing.assert_array_equal(found, expected, shape)


def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator
) -> None:
    layer = Layer(device, compiler, rng, QWEN3_30B, 2048, 600)
    together = layer.run(stream, "wide").download(np.uint16, (600, 2048))
    for token in (0, 17, 599):
        alone = layer.run(stream, "thin", tokens=1, x=layer.x.pointer + 2 * 2048 * token)
        np.testing.assert_array_equal(alone.download(np.uint16, (2048,)), together[token])


def test_an_empty_step_leaves_no_work(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator
) -> None:
    layer = Layer(device, compiler, rng, SMALL, 256, 4)
    layer.bench.arrays.counts.upload(np.zeros(3, np.uint32))
    kernels = layer.kernels
    kernels.route(stream, 4, x=layer.x.pointer, router=layer.router.pointer, shape=kernels.shapes["thin"])
    assert kernels.memory.work["item_count"].download(np.uint32, (1,))[0] == 0


def test_inputs_that_are_not_numbers_harm_no_other_token(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator
) -> None:
    layer = Layer(device, compiler, rng, SMALL, 256, 20)
    clean = bfloat16_of(layer.run(stream, "medium"), 20, 256)
    layer.x.upload(np.full(256, 0x7FC0, np.uint16), 2 * 256 * 7)
    found = bfloat16_of(layer.run(stream, "medium"), 20, 256)
    others = np.arange(20) != 7
    np.testing.assert_array_equal(found[others], clean[others])

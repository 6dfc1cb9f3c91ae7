"""Each kernel of a step, against what the card can do: ``python -m bench.gpu_kernels [--models NAME ...]``.

Random weights, bf16, and a KV cache in bf16 or FP8. Decode at batch 1, 32, 128 and 256 over 192 tokens of context (128
of prompt, half of 128 generated) unless told otherwise, and the prefill of 2,048 tokens. A kernel is timed over all
layers in one graph, so weights and pages come from memory and not from the cache; the whole step is one graph too.
Medians. A fraction is of whichever bound is nearer: bytes that must move over the bandwidth, or operations over the
tensor cores' rate, both as measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bench.families import MODELS, RandomWeights, parser_of
from bench.machine import write_json
from bench.timing import replay_seconds
from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.mixture import GemmShape
from services.gpu_engine.cuda.step_arrays import ROW_SAMPLING, HostStep, StepArrays, StepLimits
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.engine import Precision
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Attention, FeedForward, Head, Mixture, TensorSpec
from services.gpu_engine.models.float8 import to_e4m3

BYTES_PER_SECOND = 4.4e12
OPERATIONS_PER_SECOND = 790e12
CONTEXT = 192
SHAPE_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS, ROWS, PAGES_PER_SEQUENCE = 2048, 256, 128
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 1},
    "20 alternatives": {"temperature": 0.0, "top_logprobs": 20},
}


@dataclass(frozen=True)
class Cost:
    """What one launch must do at least: bytes moved, floating-point operations."""

    moved: float
    operations: float = 0.0

    @property
    def floor(self) -> float:
        """Seconds."""
        return max(self.moved / BYTES_PER_SECOND, self.operations / OPERATIONS_PER_SECOND)


def greedy(rows: int) -> NDArray[np.void]:
    sampling = np.zeros(rows, ROW_SAMPLING)
    sampling["top_p"] = sampling["repetition_penalty"] = 1.0
    return sampling


def random_step(
    rng: np.random.Generator, table: NDArray[np.int32], vocabulary: int, rows: Sequence[tuple[int, int]]
) -> HostStep:
    """Random tokens: (in the cache, of this step) for each row, whose pages ``table`` has; the last is sampled."""
    counts = [count for _, count in rows]
    return HostStep(
        token_ids=rng.integers(0, vocabulary, sum(counts)).astype(np.int32),
        positions=np.concatenate([np.arange(a, a + n) for a, n in rows]).astype(np.int32),
        row_start=np.cumsum([0, *counts]).astype(np.int32),
        kv_length=np.array([a + n for a, n in rows], np.int32),
        sequence=np.arange(len(rows), dtype=np.int32),
        page_table=table,
        sample_row=np.arange(len(rows), dtype=np.int32),
        sampling=greedy(len(rows)),
        history=np.zeros(1, np.uint32),
    )


def random_cache(nbytes: int, kv_cache: Precision, buffer: Buffer | None = None) -> Buffer:
    """Fill the buffer, or a new one, with normal keys and values."""
    values = np.random.default_rng().standard_normal(1 << 24).astype(np.float32)
    tile = to_e4m3(values) if kv_cache == "fp8" else to_bfloat16(values).view(np.uint8)
    buffer = buffer or Buffer(nbytes)
    for offset in range(0, nbytes, tile.nbytes):
        buffer.upload(tile[: nbytes - offset], offset)
    return buffer


Timed = tuple[str, int, Callable[[], None], Cost]


class Bench:
    """A random model and the timing of its parts."""

    def __init__(self, config: ModelConfig, *, skinny: bool, overlap: bool, kv_cache: Precision = "bf16") -> None:
        self.config = config
        self.device, self.stream = Device(), Stream(overlap=overlap)
        self.geometry = Geometry(config, kv_cache=kv_cache)
        source = RandomWeights(config)
        self.layers = source.layers
        self.weights = DeviceWeights(source)
        limits = StepLimits(TOKENS, ROWS, PAGES_PER_SEQUENCE)
        self.pages = 8192
        compiler = Compiler(self.device.arch, default_cache())
        self.arrays = StepArrays(limits)
        self.executor = StepExecutor(
            self.device,
            self.geometry,
            self.layers,
            self.weights,
            step=self.arrays.addresses,
            limits=limits,
            pages=self.pages,
            compiler=compiler,
            skinny=skinny,
        )
        random_cache(self.executor.cache.nbytes, kv_cache, self.executor.cache)

    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        """Upload a step of (tokens in the cache, tokens of this step) rows; the last token of each is sampled."""
        rng = np.random.default_rng()
        table = np.zeros((ROWS, PAGES_PER_SEQUENCE), np.int32)
        free = rng.permutation(self.pages)
        for line, (computed, count) in enumerate(rows):
            needed = -(-(computed + count) // self.geometry.page_size)
            table[line, :needed], free = free[:needed], free[needed:]
        self.arrays.upload(random_step(rng, table, self.config.vocabulary, rows))

    def kernels(self, rows: Sequence[tuple[int, int]]) -> Iterator[Timed]:
        """(name, launches, all of them, cost of one) for each kernel of the step."""
        config, stream, executor = self.config, self.stream, self.executor
        buffers, kernels, weights = executor.activations, executor.kernels, self.weights
        attention = [layer for layer in self.layers if isinstance(layer, Attention)]
        feed_forward = [layer for layer in self.layers if isinstance(layer, FeedForward)]
        mixtures = [layer for layer in self.layers if isinstance(layer, Mixture)]
        head = next(layer for layer in self.layers if isinstance(layer, Head))
        tokens, samples = sum(n for _, n in rows), len(rows)
        residual, normed, delta = buffers.residual.pointer, buffers.normed.pointer, buffers.delta.pointer
        qkv, attended = buffers.qkv.pointer, buffers.attended.pointer
        gate_up, activated, final = buffers.gate_up.pointer, buffers.activated.pointer, buffers.final.pointer
        width, hidden, ffn, query = self.geometry.qkv_width, config.hidden, config.ffn, config.query_width
        pages = [executor.layer_pages(layer.index) for layer in attention]
        keys, key_bytes = sum(a + n for a, n in rows), self.geometry.key_bytes
        pairs = sum(n * a + n * (n + 1) / 2 for a, n in rows)  # (query, visible key)

        def product(name: str, x: int, out: int, specs: list[TensorSpec], n: int, k: int) -> Timed:
            def launch() -> None:
                for spec in specs:
                    executor.products.matmul(stream, x, weights.address(spec), out, m=tokens, n=n, k=k)

            return name, len(specs), launch, Cost(2 * (n * k + tokens * (n + k)), 2 * tokens * n * k)

        def each(count: int, launch: Callable[[int], None]) -> tuple[int, Callable[[], None]]:
            def launch_all() -> None:
                for i in range(count):
                    launch(i)

            return count, launch_all

        groups = (feed_forward, mixtures) if mixtures else (attention, feed_forward)  # behind a mixture: combine
        norm_specs = [layer.norm for group in groups for layer in group]
        norms = [weights.address(spec) for spec in norm_specs]
        yield "plan_attention", 1, lambda: kernels.plan_attention(stream), Cost(4 * (tokens + 3 * samples))
        yield (
            "add_rms_norm",
            *each(
                len(norms),
                lambda i: kernels.rms_norm(stream, tokens, residual=residual, delta=delta, weight=norms[i], out=normed),
            ),
            Cost(12 * tokens * hidden + 2 * hidden),
        )
        yield product("qkv product", normed, qkv, [layer.query for layer in attention], width, hidden)
        yield (
            "rotary + KV write",
            *each(len(attention), lambda i: executor.rotary(stream, attention[i], tokens)),
            Cost(2 * tokens * width + 2 * tokens * config.query_width + tokens * 2 * config.kv_heads * key_bytes),
        )

        def attend() -> None:
            kernels.plan_attention(stream)  # resets the layers' tickets
            for i, layer_pages in enumerate(pages):
                kernels.attention(
                    stream, i, qkv=qkv, tokens=tokens, layer_pages=layer_pages, pages=executor.pages, out=attended
                )

        yield (
            "attention",
            len(pages),
            attend,
            Cost(2 * keys * config.kv_heads * key_bytes + 4 * tokens * query, 4 * pairs * query),
        )
        yield product("output product", attended, delta, [layer.output for layer in attention], hidden, query)
        if feed_forward:
            yield product("gate-up product", normed, gate_up, [layer.gate for layer in feed_forward], 2 * ffn, hidden)
            yield (
                "swiglu",
                *each(len(feed_forward), lambda _: kernels.swiglu(stream, tokens, gate_up, activated)),
                Cost(6 * tokens * ffn),
            )
            yield product("down product", activated, delta, [layer.down for layer in feed_forward], hidden, ffn)
        if mixtures:
            yield from self.mixture_kernels(mixtures, tokens)
        yield (
            "final_norm",
            *each(
                1,
                lambda _: kernels.final_norm(
                    stream, samples, residual=residual, delta=delta, weight=norms[0], out=final
                ),
            ),
            Cost(8 * samples * hidden),
        )
        yield (
            "sample",
            *each(1, lambda _: executor.sampler.sample(stream, samples, buffers.logits.pointer)),
            Cost(4 * samples * config.vocabulary),
        )
        yield (
            "logits product",
            *each(1, lambda _: executor.logits(stream, head, samples)),
            Cost(
                2 * config.vocabulary * hidden + samples * (2 * hidden + 4 * config.vocabulary),
                2 * samples * config.vocabulary * hidden,
            ),
        )

    def mixture_kernels(self, layers: list[Mixture], tokens: int) -> Iterator[Timed]:
        """The kernels of mixture layers; costs are of the experts that the last routing used."""
        mixture, hidden, kernels = self.config.mixture, self.config.hidden, self.executor.mixture
        assert mixture
        assert kernels
        stream, address, buffers = self.stream, self.weights.address, self.executor.activations
        normed, shape = buffers.normed.pointer, kernels.shape_for(tokens)
        rows, width, ffn = tokens * mixture.per_token, 2 * hidden, mixture.ffn

        def route() -> None:
            for layer in layers:
                kernels.route(stream, tokens, x=normed, router=address(layer.router), shape=shape)

        def gate_up() -> None:
            for layer in layers:
                kernels.gate_up(stream, tokens, x=normed, weight=address(layer.experts[0].gate), shape=shape)

        def down() -> None:
            for layer in layers:
                kernels.down(stream, tokens, weight=address(layer.experts[0].down), shape=shape)

        def combine() -> None:
            for layer in layers:
                residual, weight = buffers.residual.pointer, address(layer.norm)
                kernels.combine_norm(stream, tokens, residual=residual, weight=weight, out=buffers.normed.pointer)

        routed = Cost(width * (mixture.experts + tokens), 2 * tokens * hidden * mixture.experts)
        yield "route", len(layers), route, routed
        used = np.unique(kernels.memory.work["chosen"].download(np.int32, (rows,))).size
        operations = 2.0 * rows * hidden * ffn
        yield (
            f"gate-up, {used} experts",
            len(layers),
            gate_up,
            Cost(2 * used * width * ffn + width * tokens + 2 * rows * ffn, 2 * operations),
        )
        yield "down", len(layers), down, Cost(used * width * ffn + rows * (2 * ffn + width), operations)
        yield "combine and norm", len(layers), combine, Cost(width * rows + 5 * width * tokens)

    def mixture_shapes(self, rows: int) -> dict[str, float]:
        """Milliseconds of a step of ``rows`` tokens' grouped products, over all layers, in each of their shapes."""
        kernels, normed = self.executor.mixture, self.executor.activations.normed.pointer
        if not kernels:
            return {}
        self.arrays.counts.upload(np.array([rows, 1, 1], np.uint32))
        layers = [layer for layer in self.layers if isinstance(layer, Mixture)]
        times: dict[str, float] = {}
        for name, shape in kernels.shapes.items():

            def launch(shape: GemmShape = shape) -> None:
                for layer in layers:
                    router, gate, down = (
                        self.weights.address(spec)
                        for spec in (layer.router, layer.experts[0].gate, layer.experts[0].down)
                    )
                    kernels.route(self.stream, rows, x=normed, router=router, shape=shape)
                    kernels.gate_up(self.stream, rows, x=normed, weight=gate, shape=shape)
                    kernels.down(self.stream, rows, weight=down, shape=shape)

            times[name] = 1e3 * replay_seconds(self.stream, launch)
        each = ", ".join(f"{name} {time:.3f}" for name, time in times.items())
        print(f"routing and products of {rows:4} tokens by shape, ms a step: {each}")
        return times

    def sampling(self, rows: int) -> dict[str, float]:
        """Microseconds of sampling alone, with the parameters that change how much of the vocabulary it reads."""
        rng = np.random.default_rng()
        logits = self.executor.activations.logits
        logits.upload((rng.standard_normal((rows, self.config.vocabulary)) * 3).astype(np.float32))
        self.arrays.counts.upload(np.array([rows, rows, rows], np.uint32))
        times: dict[str, float] = {}
        for name, parameters in SAMPLING.items():
            sampling = greedy(rows)
            for parameter, value in parameters.items():
                sampling[parameter] = value
            sampling["seed"] = rng.integers(0, 1 << 62, rows)
            self.arrays.sampling.upload(sampling)
            seconds = replay_seconds(
                self.stream, lambda: self.executor.sampler.sample(self.stream, rows, logits.pointer)
            )
            times[name] = 1e6 * seconds
        print(f"sampling of {rows:3} rows, us: " + ", ".join(f"{name} {time:.1f}" for name, time in times.items()))
        return times

    def report(self, name: str, rows: Sequence[tuple[int, int]], *, kernels: bool) -> dict[str, Any]:
        """Print a step and its kernels. Returns milliseconds of the step, and of each kernel what is printed."""
        self.step(rows)
        tokens, samples = sum(n for _, n in rows), len(rows)
        step = replay_seconds(self.stream, lambda: self.executor.launch(self.stream, tokens, samples))
        found: dict[str, Any] = {"step_ms": 1e3 * step}
        print(f"\n{name}: step {step * 1e3:.3f} ms", flush=True)
        if tokens == samples <= self.executor.fused_rows:
            fused = replay_seconds(self.stream, lambda: self.executor.launch_decode(self.stream, samples))
            found["fused_step_ms"] = 1e3 * fused
            print(f"fused in one kernel: step {fused * 1e3:.3f} ms", flush=True)
        if not kernels:
            return found
        print(
            f"{'kernel':20} {'launches':>8} {'us':>8} {'MB':>9} {'TB/s':>6} {'TFLOP/s':>8}"
            f" {'of bound':>9} {'ms/step':>8}"
        )
        total = floor = 0.0
        for kernel, launches, launch, cost in self.kernels(rows):
            each = replay_seconds(self.stream, launch) / launches
            total, floor = total + each * launches, floor + cost.floor * launches
            found[kernel] = {"launches": launches, "us": 1e6 * each, "bytes": cost.moved, "operations": cost.operations}
            print(
                f"{kernel:20} {launches:8} {each * 1e6:8.2f} {cost.moved / 1e6:9.2f} {cost.moved / each / 1e12:6.2f}"
                f" {cost.operations / each / 1e12:8.1f} {cost.floor / each:9.1%} {each * launches * 1e3:8.3f}"
            )
        print(f"{'sum':64} {floor / total:9.1%} {total * 1e3:8.3f}  floor {floor * 1e3:.3f}")
        return found


def measure(
    bench: Bench, batches: Sequence[int], prefill: Sequence[int], *, context: int, kernels: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for batch in batches:
        rows = [(context - 1, 1)] * batch
        found[f"decode_{batch}"] = bench.report(f"decode, batch {batch}, context {context}", rows, kernels=kernels)
    print()
    for batch in batches if kernels else []:
        found[f"sampling_{batch}_us"] = bench.sampling(batch)
    for tokens in prefill:
        found[f"prefill_{tokens}"] = bench.report(f"prefill of {tokens} tokens", [(0, tokens)], kernels=kernels)
    if prefill and kernels:
        print()
        for tokens in SHAPE_TOKENS:  # the activations are a prompt's
            found[f"mixture_{tokens}_ms"] = bench.mixture_shapes(tokens)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128, 256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048])
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a decode row, 2,048 at most")
    parser.add_argument("--library", action="store_true", help="products by cuBLASLt alone")
    parser.add_argument("--overlap", action="store_true", help="launches overlap")
    parser.add_argument("--kv-cache", choices=get_args(Precision), default="bf16")
    parser.add_argument("--steps", action="store_true", help="whole steps alone")
    parser.add_argument("--json", type=Path, help="write results there too")
    arguments, found = parser.parse_args(), {}
    for name in arguments.models:
        bench = Bench(
            MODELS[name], skinny=not arguments.library, overlap=arguments.overlap, kv_cache=arguments.kv_cache
        )
        print(f"\n{name} on {bench.device.name} {bench.device.arch}, KV cache {arguments.kv_cache}")
        found[name] = measure(
            bench, arguments.batches, arguments.prefill, context=arguments.context, kernels=not arguments.steps
        )
        del bench  # its device memory
    write_json(arguments.json, "gpu_kernels", found)


if __name__ == "__main__":
    main()

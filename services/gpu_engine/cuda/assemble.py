"""From a checkpoint and a ring to a cuda engine: device, weights, executor, step graphs, control loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, Protocol

from services.common.logging import get_logger
from services.gpu_engine.cuda.choosing import excerpt_of
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.control_loop.build import THREADS, build_control_loop
from services.gpu_engine.cuda.control_loop.loop import ControlLoop
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.engine import CudaEngine
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.graph_cache import DecodeSteps, Record, default_buckets
from services.gpu_engine.cuda.host_loop.loop import HostLoop
from services.gpu_engine.cuda.memory_plan import memory_parts, require_device_memory
from services.gpu_engine.cuda.phases import Phases
from services.gpu_engine.cuda.ring_memory import GpuRing, RingPlace
from services.gpu_engine.cuda.step_arrays import StepLimits
from services.gpu_engine.cuda.step_loop import LoopConfig, StepLoop
from services.gpu_engine.cuda.warm_up import warm_up
from services.gpu_engine.cuda.weights import DeviceWeights, WeightSource, fp8_stacks, scratch_bytes
from services.gpu_engine.engine import EngineLimits, Precision
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Layer
from services.ring.header import read_ring_info
from services.ring.memory import MemoryTransport, Region

StageProgress = Callable[[str, int, int], None]  # stage, done, total
SchedulerPlace = Literal["gpu", "host"]  # where the scheduling core runs


class Model(WeightSource, Protocol):
    """What is read of a checkpoint."""

    @property
    def config(self) -> ModelConfig: ...

    def kv_scales(self, layer: int) -> tuple[float, float]: ...


log = get_logger(component="cuda_engine")


def assemble(
    model: Model,
    region: Region,
    limits: EngineLimits,
    *,
    epoch: int,
    progress: StageProgress,
    scheduler: SchedulerPlace = "gpu",
    ring_place: RingPlace = "host",
    kv_cache: Precision = "bf16",
    stored_fp8: Collection[str] = frozenset(),
    around: Callable[[Record], Record] = lambda record: record,
) -> CudaEngine:
    """Load and allocate everything, compile what is not cached, capture the step graphs. Run the engine on this thread.

    What is needed is compared with what is free before anything is loaded, and the largest step has run once when this
    returns: nothing that a step needs is left to be allocated.

    Args:
        region: a formatted ring.
        epoch: of this start; differs for every start.
        scheduler: "host" is there to be compared with.
        ring_place: where the GPU's control loop finds the ring; elsewhere than in the region it is a copy of that.
        kv_cache: what keys and values are kept as, in pages of half the bytes if fp8.
        stored_fp8: names of the tensors that ``model`` has in FP8; those of products stay so on the device.
        around: for measurements: launches something before and after the step's kernels.

    Raises:
        EngineError: limits that the engine can't work with.
        CudaError: no GPU, too little memory (saying for what and how much), a model that the kernels can't run.
        CheckpointError
    """
    limits.check()
    phases = Phases()
    with phases.of("device"):
        device = Device()
    geometry = Geometry(model.config, limits.page_size, kv_cache)
    compiler = Compiler(device.arch, default_cache())
    config = LoopConfig(**limits.scheduler_settings(model.config.eos_ids, decodes_exactly=False))
    with phases.of("control loop"):
        loop, ring = make_loop(
            scheduler, device, compiler, config=config, region=region, epoch=epoch, ring_place=ring_place
        )
    step_limits = StepLimits(limits.max_batched_tokens, limits.max_running, loop.step.pages_per_sequence)
    fp8 = fp8_stacks(model.layers, stored_fp8)
    parts = memory_parts(model.layers, geometry, step_limits, limits.kv_pages, fp8)
    require_device_memory(parts, device.free_bytes(), geometry, limits.context)
    with phases.of("weights"):
        weights = DeviceWeights(model, partial(progress, "loading weights"), fp8)
    with phases.of("kernels"):
        executor = StepExecutor(
            device,
            geometry,
            model.layers,
            weights,
            step=loop.step,
            limits=step_limits,
            pages=limits.kv_pages,
            compiler=compiler,
            kv_scales=[model.kv_scales(layer) for layer in range(model.config.layers)],
            fp8_scratch=scratch_bytes(model.layers, fp8),
        )

    def record(stream: Stream, bucket: int, layers: Sequence[Layer] | None = None) -> None:
        executor.launch(stream, bucket, min(bucket, limits.max_running), layers)

    buckets, decode = default_buckets(limits.max_batched_tokens), None
    if most := min(executor.fused_rows, limits.max_running):
        decode = DecodeSteps(executor.launch_decode, default_buckets(most))
    excerpt = partial(record, layers=excerpt_of(model.layers))
    choosing = partial(progress, "choosing matrix products")
    with phases.of("products"):
        executor.activations.randomize()
        warm_up(compiler, executor.products, buckets, record, excerpt, progress=choosing)
    with phases.of("graphs"):
        if decode:
            for rows in decode.buckets:
                decode.record(Stream(), rows)
            device.synchronize()
        graphs = loop.capture(
            around(record), buckets, partial(progress, "capturing step graphs"), decode and decode.around(around)
        )
    log.info(
        "loaded",
        gpu=device.name,
        scheduler=scheduler,
        weight_bytes=weights.nbytes,
        kv_cache=kv_cache,
        kv_bytes=executor.cache.nbytes,
        kv_pages=limits.kv_pages,
        graphs=len(graphs.buckets) + len(graphs.decode_buckets),
        graph_bytes=graphs.nbytes,
        free_bytes=device.free_bytes(),
        seconds=phases.seconds(),
    )
    transport = MemoryTransport(region) if ring is None else ring.transport
    return CudaEngine(loop, transport, (ring, executor), None if ring is None else ring.moved())


def make_loop(
    scheduler: SchedulerPlace,
    device: Device,
    compiler: Compiler,
    *,
    config: LoopConfig,
    region: Region,
    epoch: int,
    ring_place: RingPlace = "host",
    threads: int = THREADS,
    trace: bool = False,
) -> tuple[StepLoop, GpuRing | None]:
    """The loop for a formatted ring, and the ring's memory as the GPU sees it, which must live as long.

    ``threads`` and ``trace`` are of the GPU's loop (``build_control_loop``).
    """
    if scheduler == "host":
        return HostLoop(device, compiler, config, region, epoch), None
    geometry = read_ring_info(MemoryTransport(region)).geometry
    ring = GpuRing(device, region, geometry, ring_place)
    cubin = build_control_loop(device.arch, compiler.cache, threads=threads, trace=trace)
    return ControlLoop(device, cubin, config, (ring.pointer, ring.outbound), epoch), ring

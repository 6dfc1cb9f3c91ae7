"""The graph cache: a step graph for each bucket of tokens, which a control loop launches.

A step of n tokens runs the smallest graph that holds n; how many there really are, its kernels read from device
memory. Steps in which every row is one token may have graphs of their own (``DecodeSteps``). For launches from the GPU
each graph is instantiated twice, because there an instance can't be launched again before it has wholly retired, which
the GPU finishes some time after the graph's last kernel has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.control_loop.errors import GraphCacheError
from services.gpu_engine.cuda.driver import Buffer, Device, Stream, check, outside_captures
from services.gpu_engine.cuda.errors import DriverError

INSTANCES = 2
Record = Callable[[Stream, int], None]  # launch a step of at most so many tokens
Progress = Callable[[int, int], None]  # buckets done, in all


@dataclass(frozen=True)
class DecodeSteps:
    """Graphs for steps in which every row is one token.

    Attributes:
        record: launches one of at most so many rows.
        buckets: rising numbers of rows; larger steps run the ordinary graphs.
    """

    record: Record
    buckets: Sequence[int]

    def around(self, wrap: Callable[[Record], Record]) -> DecodeSteps:
        return DecodeSteps(wrap(self.record), self.buckets)


STEP_GRAPH = np.dtype([("instances", "<u8", INSTANCES), ("tokens", "<u8")])
"""StepGraph of control_loop/loop.cuh."""

# From the GPU.
_LAUNCHABLE = {
    cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
    cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY,
    cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET,
    cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH,
    cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY,
}


def default_buckets(max_batched_tokens: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 128, of 16 to 256, of 32 to 512, and so on.

    So at most an eighth of a step is padding from 64 tokens on, where its cost begins to follow its tokens.
    """
    buckets = [1, 2, 4, 8]
    while buckets[-1] < max_batched_tokens:
        last = buckets[-1]
        buckets.append(last + max(8, (1 << last.bit_length() >> 1) // 8))
    return [bucket for bucket in buckets if bucket < max_batched_tokens] + [max_batched_tokens]


class ExecutableGraph:
    """A captured graph, instantiated and uploaded.

    Args:
        instances: how many; a launch from the host takes the first.
        from_gpu: it will be launched from the GPU, which not every graph can be.

    Raises GraphCacheError when the driver refuses it.
    """

    def __init__(self, name: str, graph: Any, stream: Stream, *, instances: int, from_gpu: bool = True) -> None:
        self._graph = graph
        self._instances: list[Any] = []
        self.nodes = _node_types(graph)
        refused = sorted({kind.name for kind in self.nodes if kind not in _LAUNCHABLE})
        if refused and from_gpu:
            raise GraphCacheError(
                f"{name} contains {', '.join(refused)}: only kernels, copies and sets can be launched"
            )
        flags = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.value if from_gpu else 0
        try:
            for _ in range(instances):
                instance = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, flags))
                self._instances.append(instance)
                check("cuGraphUpload", cu.cuGraphUpload(instance, stream.handle))
        except DriverError as error:
            demand = "; it must hold kernels, device-to-device copies and sets of one device only" if from_gpu else ""
            place = "GPU" if from_gpu else "host"
            raise GraphCacheError(
                f"{name} of {len(self.nodes)} nodes can't be instantiated for launches from the {place}: "
                f"{error}{demand}"
            ) from error

    @property
    def handles(self) -> list[int]:
        """What device code gives to cudaGraphLaunch."""
        return [int(instance) for instance in self._instances]

    def launch(self, stream: Stream) -> None:
        """Launch the first instance from the host."""
        check("cuGraphLaunch", cu.cuGraphLaunch(self._instances[0], stream.handle))

    def __del__(self) -> None:
        with outside_captures():
            for instance in self._instances:
                cu.cuGraphExecDestroy(instance)
            cu.cuGraphDestroy(self._graph)


def capture(name: str, stream: Stream, launch: Callable[[], None]) -> Any:
    """What ``launch`` puts on the stream, as a graph. Raises GraphCacheError when that can't be captured."""
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream.handle, mode))
    try:
        launch()
    except DriverError as error:
        cu.cuStreamEndCapture(stream.handle)
        raise GraphCacheError(f"{name} can't be captured: {error}") from error
    except BaseException:
        cu.cuStreamEndCapture(stream.handle)
        raise
    try:
        return check("cuStreamEndCapture", cu.cuStreamEndCapture(stream.handle))
    except DriverError as error:
        raise GraphCacheError(f"{name} can't be captured: {error}") from error


class GraphCache:
    """Captures, instantiates and uploads the step graphs.

    Args:
        record: launches a whole step of at most so many tokens; called once a bucket.
        buckets: token counts.
        progress: called after each bucket.
        decode: further graphs.
        from_gpu: the graphs are launched from the GPU, by way of ``table``; else from the host.

    Attributes:
        buckets: token counts.
        decode_buckets: row counts of the further graphs.
        table: what the control loop on the GPU chooses from, those of decode_buckets and then those of buckets,
            STEP_GRAPH in device memory.
        nbytes: device memory that the graphs took, as the driver's free memory tells.
    """

    def __init__(
        self,
        device: Device,
        record: Record,
        buckets: Sequence[int],
        progress: Progress = lambda _done, _total: None,
        *,
        decode: DecodeSteps | None = None,
        from_gpu: bool = True,
    ) -> None:
        self.buckets, self.decode_buckets = list(buckets), list(decode.buckets if decode else ())
        for name, counts in (("buckets", self.buckets), ("decode buckets", self.decode_buckets or [1])):
            if not counts or sorted(set(counts)) != counts or counts[0] < 1:
                raise ValueError(f"{name} are {counts}, must be rising token counts from 1")
        free = device.free_bytes()
        stream = Stream()
        self._graphs: list[ExecutableGraph] = []
        wanted = [(f"of {rows} rows that decode", decode.record, rows) for rows in self.decode_buckets if decode]
        wanted += [(f"for {tokens} tokens", record, tokens) for tokens in self.buckets]
        for done, (what, launch, bucket) in enumerate(wanted):
            name = f"the step graph {what}"
            captured = capture(name, stream, partial(launch, stream, bucket))
            instances = INSTANCES if from_gpu else 1
            self._graphs.append(ExecutableGraph(name, captured, stream, instances=instances, from_gpu=from_gpu))
            progress(done + 1, len(wanted))
        stream.synchronize()
        rows = np.zeros(len(wanted) if from_gpu else 0, STEP_GRAPH)
        for row, graph, (_, _, bucket) in zip(rows, self._graphs, wanted, strict=False):
            row["instances"], row["tokens"] = graph.handles, bucket
        self.table = Buffer.of(rows.view(np.uint8))
        self.nbytes = free - device.free_bytes()

    @property
    def nodes(self) -> int:
        """Of the largest graph."""
        return max(len(graph.nodes) for graph in self._graphs)

    def graph(self, tokens: int, rows: int) -> ExecutableGraph:
        """The smallest graph that holds a step of so many tokens and rows."""
        first = bisect_left(self.decode_buckets, tokens)
        if tokens == rows and first < len(self.decode_buckets):
            return self._graphs[first]
        return self._graphs[len(self.decode_buckets) + bisect_left(self.buckets, tokens)]


def _node_types(graph: Any) -> list[Any]:
    # Called without an array first: that only counts.
    count = check("cuGraphGetNodes", cu.cuGraphGetNodes(graph, 0))[1]
    nodes = check("cuGraphGetNodes", cu.cuGraphGetNodes(graph, count))[0]
    return [check("cuGraphNodeGetType", cu.cuGraphNodeGetType(node)) for node in nodes[:count]]

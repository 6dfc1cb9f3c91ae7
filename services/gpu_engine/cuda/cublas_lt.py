"""Matrix products through cuBLASLt: out[m, n] = x[m, k] @ weight[n, k]^T, bf16 operands, fp32 sums.

A thin ctypes layer; which algorithm to take is the caller's choice (products.py). The workspace is fixed, so launches
can be captured in graphs. Reference: docs.nvidia.com/cuda/cublas, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Literal, NamedTuple

from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.errors import CudaUnavailableError, DriverError
from services.gpu_engine.cuda.geometry import BF16_BYTES

R_32F, R_16BF = 0, 14  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t
TRANSPOSE_A, SM_COUNT_TARGET = 3, 15  # cublasLtMatmulDescAttributes_t
MAX_WORKSPACE, REDUCTION_SCHEMES = 1, 3  # cublasLtMatmulPreferenceAttributes_t
NO_REDUCTION, ANY_REDUCTION = 0, 7  # cublasLtReductionScheme_t
OP_TRANSPOSE = 1  # cublasOperation_t
WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
CANDIDATES = 8  # of each target
SHORT_K, K_ALIGNMENT = 1024, 64

Ending = Literal["bf16", "fp32", "swiglu"]


class Shape(NamedTuple):
    """out[m, n] = x[m, k] @ weight[n, k]^T, or with SwiGLU silu(x @ gate^T) * (x @ up^T), weight being gate over up."""

    m: int
    n: int
    k: int
    ending: Ending

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.ending == "swiglu" else self.n

    @property
    def out_bytes(self) -> int:
        return (4 if self.ending == "fp32" else BF16_BYTES) * self.m * self.n

    @property
    def bytes(self) -> int:
        """That must be moved."""
        return BF16_BYTES * self.k * (self.m + self.weight_rows) + self.out_bytes

    @property
    def operations(self) -> int:
        return 2 * self.m * self.weight_rows * self.k


class Operands(NamedTuple):
    """Addresses in device memory; all row-major."""

    x: int
    weight: int
    out: int


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: may be stored and used again by the same version of the library."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """A handle and its workspace.

    Attributes:
        version: of the library; algorithms are good for the same version.
    """

    def __init__(self, device: Device) -> None:
        self._library = _load()
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = f"cuBLASLt {self._library.cublasLtGetVersion()}"
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = Buffer(WORKSPACE_BYTES, "the cuBLASLt workspace")
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._layouts: dict[tuple[int, int, int], ctypes.c_void_p] = {}
        # The control loop will occupy one multiprocessor: which target is better depends on the shape.
        targets = (device.multiprocessors, device.multiprocessors - 1)
        self._operations = {target: self._operation(target) for target in targets}

    def launch(self, stream: Stream, shape: Shape, operands: Operands, candidate: str) -> None:
        """Launch a product, not one with SwiGLU, by one of ``candidates(shape)``. Raises DriverError when refused."""
        target, algorithm = _parsed(candidate)
        weight_layout, x_layout, out_layout = self._layouts_of(shape)
        self._call(
            "cublasLtMatmul",
            self._handle,
            self._operations[target],
            ctypes.byref(self._one),
            ctypes.c_void_p(operands.weight),
            weight_layout,
            ctypes.c_void_p(operands.x),
            x_layout,
            ctypes.byref(self._zero),
            ctypes.c_void_p(operands.out),
            out_layout,
            ctypes.c_void_p(operands.out),
            out_layout,
            ctypes.byref(algorithm),
            ctypes.c_void_p(self._workspace.pointer),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(int(stream.handle)),
        )

    def candidates(self, shape: Shape, *, split: bool) -> list[str]:
        """What the library suggests, its first choice first: the target in multiprocessors and the algorithm, as text.

        Without a split, it is asked for the product of a short k: for a long one it suggests few or bad ones
        (docs/performance.md, "Matrix products").

        Args:
            split: algorithms may cut k and add the parts.

        Raises:
            DriverError: it suggests nothing.
        """
        found: dict[str, None] = {}  # in order
        reductions = ANY_REDUCTION if split else NO_REDUCTION
        for asked in (shape,) if split else (_of_short_k(shape), shape):
            for target, operation in self._operations.items():
                for heuristic in self._suggestions(asked, operation, reductions):
                    if heuristic.state == 0 and self._accepts(shape, operation, heuristic.algorithm):
                        found[f"{target}:{bytes(heuristic.algorithm).hex()}"] = None
            if found:
                return list(found)
        raise DriverError("cublasLtMatmulAlgoGetHeuristic", "no algorithm", f"for {shape}")

    def _suggestions(self, shape: Shape, operation: ctypes.c_void_p, reductions: int) -> list[_Heuristic]:
        weight, x, out = self._layouts_of(shape)
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        schemes = ctypes.c_uint32(reductions)
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, limit)
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, REDUCTION_SCHEMES, schemes)
        heuristics, found = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        try:
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                operation,
                weight,
                x,
                out,
                out,
                preference,
                CANDIDATES,
                heuristics,
                ctypes.byref(found),
            )
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        return heuristics[: found.value]

    def _accepts(self, shape: Shape, operation: ctypes.c_void_p, algorithm: Algorithm) -> bool:
        weight, x, out = self._layouts_of(shape)
        result = _Heuristic()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, operation, weight, x, out, out, ctypes.byref(algorithm), ctypes.byref(result)
        )
        return bool(status == 0 and result.workspace <= WORKSPACE_BYTES)

    def _operation(self, multiprocessors: int) -> ctypes.c_void_p:
        # The library is column-major: it sees weight as [k, n], x as [k, m] and out as [n, m].
        operation = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(operation), COMPUTE_32F, R_32F)
        self._set("cublasLtMatmulDescSetAttribute", operation, TRANSPOSE_A, ctypes.c_int32(OP_TRANSPOSE))
        self._set("cublasLtMatmulDescSetAttribute", operation, SM_COUNT_TARGET, ctypes.c_int32(multiprocessors))
        return operation

    def _layouts_of(self, shape: Shape) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
        """Of weight, x and out."""
        m, n, k, ending = shape
        out = self._layout(R_32F if ending == "fp32" else R_16BF, n, m)
        return self._layout(R_16BF, k, n), self._layout(R_16BF, k, m), out

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        key = kind, rows, columns
        if key not in self._layouts:
            layout = ctypes.c_void_p()
            sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
            self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, *sizes)
            self._layouts[key] = layout
        return self._layouts[key]

    def _set(self, call: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(call, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise DriverError(name, f"status {status}", "see cublasStatus_t")

    def __del__(self) -> None:
        for layout in getattr(self, "_layouts", {}).values():
            self._library.cublasLtMatrixLayoutDestroy(layout)
        for operation in getattr(self, "_operations", {}).values():
            self._library.cublasLtMatmulDescDestroy(operation)
        if getattr(self, "_handle", None):
            self._library.cublasLtDestroy(self._handle)


def _of_short_k(shape: Shape) -> Shape:
    """Of the same m and n, and as well aligned."""
    return shape._replace(k=min(shape.k, SHORT_K + shape.k % K_ALIGNMENT))


@cache
def _parsed(candidate: str) -> tuple[int, Algorithm]:
    target, _, algorithm = candidate.partition(":")
    return int(target), Algorithm.from_buffer_copy(bytes.fromhex(algorithm))


def _load() -> ctypes.CDLL:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415 (a part of the optional extra)

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError) as error:
        raise CudaUnavailableError(f"cuBLASLt was not found ({error}): `make cuda` installs it") from error

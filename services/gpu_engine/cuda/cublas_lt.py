"""Matrix products through cuBLASLt: out[m, n] = x[m, k] @ weight[n, k]^T, bf16 operands, fp32 sums.

A thin ctypes layer. The workspace is fixed and the algorithm of each shape is chosen once, so launches can be captured
in graphs. Reference: docs.nvidia.com/cuda/cublas, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from services.gpu_engine.cuda.driver import Buffer, Stream
from services.gpu_engine.cuda.errors import CudaUnavailableError, DriverError

R_32F, R_16BF = 0, 14  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t
TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
OP_TRANSPOSE = 1  # cublasOperation_t
WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class _Plan:
    """One shape's descriptors and algorithm."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p
    heuristic: _Heuristic


class CublasLt:
    """A handle, its workspace, and the plans of the shapes seen so far."""

    def __init__(self) -> None:
        self._library = _load()
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = Buffer(WORKSPACE_BYTES, "the cuBLASLt workspace")
        self._plans: dict[tuple[int, int, int, bool], _Plan] = {}
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def matmul(
        self, stream: Stream, x: int, weight: int, out: int, *, m: int, n: int, k: int, fp32_out: bool = False
    ) -> None:
        """Launch out[m, n] = x[m, k] @ weight[n, k]^T; all row-major, addresses of device memory.

        Args:
            fp32_out: ``out`` is float32, else bf16.

        Raises:
            DriverError: the library has no algorithm, or the launch failed.
        """
        plan = self._plan(m, n, k, fp32_out)
        self._call(
            "cublasLtMatmul",
            self._handle,
            plan.operation,
            ctypes.byref(self._one),
            ctypes.c_void_p(weight),
            plan.weight,
            ctypes.c_void_p(x),
            plan.x,
            ctypes.byref(self._zero),
            ctypes.c_void_p(out),
            plan.out,
            ctypes.c_void_p(out),
            plan.out,
            ctypes.byref(plan.heuristic.algorithm),
            ctypes.c_void_p(self._workspace.pointer),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(int(stream.handle)),
        )

    def _plan(self, m: int, n: int, k: int, fp32_out: bool) -> _Plan:
        key = (m, n, k, fp32_out)
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def _make_plan(self, m: int, n: int, k: int, fp32_out: bool) -> _Plan:
        # The library is column-major: it sees weight as [k, n], x as [k, m] and out as [n, m].
        operation = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(operation), COMPUTE_32F, R_32F)
        self._set("cublasLtMatmulDescSetAttribute", operation, TRANSPOSE_A, ctypes.c_int32(OP_TRANSPOSE))
        weight, x = self._layout(R_16BF, k, n), self._layout(R_16BF, k, m)
        out = self._layout(R_32F if fp32_out else R_16BF, n, m)
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, limit)
        heuristic, found = _Heuristic(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            operation,
            weight,
            x,
            out,
            out,
            preference,
            1,
            ctypes.byref(heuristic),
            ctypes.byref(found),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if found.value == 0 or heuristic.state != 0:
            raise DriverError("cublasLtMatmulAlgoGetHeuristic", "no algorithm", f"m={m} n={n} k={k}")
        return _Plan(operation, weight, x, out, heuristic)

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            kind,
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )
        return layout

    def _set(self, call: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(call, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise DriverError(name, f"status {status}", "see cublasStatus_t")

    def __del__(self) -> None:
        for plan in getattr(self, "_plans", {}).values():
            for layout in (plan.weight, plan.x, plan.out):
                self._library.cublasLtMatrixLayoutDestroy(layout)
            self._library.cublasLtMatmulDescDestroy(plan.operation)
        if getattr(self, "_handle", None):
            self._library.cublasLtDestroy(self._handle)


def _load() -> ctypes.CDLL:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415 (a part of the optional extra)

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError) as error:
        raise CudaUnavailableError(f"cuBLASLt was not found ({error}): pip install 'blink[cuda]'") from error

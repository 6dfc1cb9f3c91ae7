from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

def philox(key: int, counter: Sequence[int]) -> list[int]:
    """Philox4x32-10: four 32-bit words."""

class Arena:
    """Memory for weights, in huge pages where the system has them; kept by every Linear made from it."""

    def __init__(self) -> None: ...

class Linear:
    """One or several packed matrices with the same inputs; their outputs lie side by side."""

    def __init__(
        self,
        arena: Arena,
        rows: Sequence[NDArray[np.uint8]],
        types: Sequence[str],
        inputs: Sequence[int],
        scales: Sequence[Floats | None] = (),
    ) -> None:
        """rows[i]: uint8 [outputs, row bytes] as stored; types[i]: a TensorType's name. Copies into panels.

        scales[i]: of an F8_E4M3 matrix [outputs, blocks of 32 inputs], of another None.
        """
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory of the packed weights."""

class LinearGroup:
    """Matrices of one shape, one for each expert of a mixture."""

    def __init__(self, arena: Arena) -> None: ...
    def append(
        self,
        rows: Sequence[NDArray[np.uint8]],
        types: Sequence[str],
        inputs: Sequence[int],
        scales: Sequence[Floats | None] = (),
    ) -> None:
        """One more member; arguments as of ``Linear``."""
    def __len__(self) -> int: ...

class Kernels:
    """Threads, instruction set and scratch memory. Calls must not overlap; all but the constructor release the GIL.

    Matrices are C-contiguous float32; ``tokens`` is how many of their first rows count. Each output row depends on its
    own input row alone, bit for bit. Raises ValueError when shapes disagree.
    """

    def __init__(self, threads: int, instruction_set: str = "") -> None:
        """instruction_set: avx512, avx2 or baseline; empty for the best that the CPU has."""
    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def embed(self, linear: Linear, ids: Ints, tokens: int, out: Floats) -> None:
        """out[t] = row ids[t] of the matrix."""
    def linear(self, linear: Linear, inputs: Floats, tokens: int, out: Floats, accumulate: bool = False) -> None:
        """out = inputs @ matrix.T, added to out when ``accumulate``."""
    def grouped_linear(self, group: LinearGroup, row_start: Ints, inputs: Floats, out: Floats) -> None:
        """out rows = inputs rows @ member.T for the rows row_start[e] to row_start[e + 1] of each member e."""
    def route(self, logits: Floats, tokens: int, normalized: bool, experts: Ints, weights: Floats) -> None:
        """Each token's experts [tokens, per_token], largest logit first, and their softmax weights.

        The softmax runs over all experts, over the chosen ones if ``normalized``. Ties go to the lower index.
        """
    def combine(self, rows: Floats, places: Ints, weights: Floats, tokens: int, out: Floats) -> None:
        """out[t] += sum over k of weights[t, k] * rows[places[t, k]]."""
    def rms_norm(self, inputs: Floats, weight: Floats, epsilon: float, tokens: int, out: Floats) -> None: ...
    def swiglu(self, inputs: Floats, tokens: int, out: Floats) -> None:
        """out [tokens, width] = silu(gate) * up; inputs [tokens, 2 width] holds gate, then up."""
    def rotate_and_store(
        self,
        qkv: Floats,
        heads: int,
        cosines: Floats,
        sines: Floats,
        slots: Ints,
        tokens: int,
        keys: Floats,
        values: Floats,
        query_norm: Floats | None = None,
        key_norm: Floats | None = None,
        epsilon: float = 0.0,
        fp8_scales: tuple[float, float] | None = None,
    ) -> None:
        """Rotate queries and keys of ``qkv`` in place, then store keys and values at slots[t].

        With norms [head_dim], each head's query or key is divided by its root mean square and weighted first.
        With fp8_scales (of keys, of values), what is stored is scale * e4m3(value / scale).
        slots[t] = page * page_size + offset in the page.
        cosines, sines: [tokens, rotary_dim / 2]. keys: [pages, kv_heads, head_dim, page_size].
        values: [pages, kv_heads, page_size, head_dim].
        """
    def attend(
        self,
        qkv: Floats,
        heads: int,
        lengths: Ints,
        sequences: Ints,
        page_table: Ints,
        tokens: int,
        keys: Floats,
        values: Floats,
        out: Floats,
    ) -> None:
        """out[t] = attention of qkv[t]'s queries over lengths[t] positions in the pages page_table[sequences[t]]."""
    def sample(
        self,
        logits: Floats,
        samples: int,
        sampling: NDArray[np.uint8],
        history: NDArray[np.uint32],
        tokens: Ints,
        logprobs: Floats,
        top_tokens: Ints,
        top_logprobs: Floats,
    ) -> None:
        """Choose a token for each of the first ``samples`` rows (order of operations: sampling.hpp).

        sampling: [samples, ROW_SAMPLING.itemsize]. Writes tokens, logprobs [samples], and where a row asks for n
        alternatives the first n of top_tokens, top_logprobs [samples, MAX_TOP_LOGPROBS].
        """

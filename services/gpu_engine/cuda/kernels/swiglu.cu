// SwiGLU: out = silu(gate) * up over the fused gate-up projection [tokens, gate | up] (arXiv 2002.05202), of all tokens
// that it is launched for, as the product before it has them.
//
// Eight elements a thread, grid (chunks of a row, tokens). Bound by memory: 6 bytes an output element; 82% of
// an H200's bandwidth at 256 rows of 14,336.
#include "bf16.cuh"
#include "dependent_launch.cuh"
#include "geometry.cuh"
#include "swiglu.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(256) swiglu(u32 tokens, const bf16* gate_up, bf16* out) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 token = blockIdx.y, i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (token >= tokens || i >= kFfn) return;
  const bf16* row = gate_up + static_cast<u64>(token) * 2 * kFfn;
  Eight gate = load(row + i);
  const Eight up = load(row + kFfn + i);
#pragma unroll
  for (u32 k = 0; k < 8; ++k) gate.value[k] = gated(gate.value[k], up.value[k]);
  store(out + static_cast<u64>(token) * kFfn + i, gate);
}

}  // namespace blink

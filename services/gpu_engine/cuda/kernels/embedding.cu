// Embedding gather: residual[t] = table[token_ids[t]], bf16 to the fp32 residual stream.
//
// One block a token, eight elements a thread and pass. First kernel of a step. Moves 6 bytes an element and is bound
// by launch latency at decode.
#include "dependent_launch.cuh"
#include "geometry.cuh"
#include "step.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(128) embedding(Step step, const bf16* table, float* residual) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 token = blockIdx.x;
  if (token >= step.counts->tokens) return;
  const bf16* source = table + static_cast<u64>(step.token_ids[token]) * kHidden;
  float* target = residual + static_cast<u64>(token) * kHidden;
  for (u32 i = threadIdx.x * 8; i < kHidden; i += blockDim.x * 8) store(target + i, load(source + i));
}

}  // namespace blink

// Embedding gather: residual[t] = table[token_ids[t]], bf16 to the fp32 residual stream.
//
// One block a token, eight elements a thread and pass. First kernel of a step. Moves 6 bytes an element and is bound
// by launch latency at decode.
#include "dependent_launch.cuh"
#include "embedding.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(128) embedding(Step step, const bf16* table, float* residual) {
  let_successor_begin();
  wait_for_predecessor();
  if (blockIdx.x < step.counts->tokens) embed(step, blockIdx.x, table, residual);
}

}  // namespace blink

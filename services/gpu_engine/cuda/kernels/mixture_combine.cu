// Ends a mixture-of-experts layer: out[t] = sum over a token's experts of weight x result, the largest weight first.
//
// One block a token, eight elements a thread and pass. Bound by memory: 2 (kChosen + 1) bytes an element.
#include "dependent_launch.cuh"
#include "mixture.cuh"
#include "step.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(256)
    mixture_combine(Step step, MixtureWork work, const bf16* rows, bf16* out) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 token = blockIdx.x;
  if (token >= step.counts->tokens) return;
  const i32* places = work.places + token * kChosen;
  const float* weights = work.weights + token * kChosen;
  for (u32 i = threadIdx.x * 8; i < kHidden; i += blockDim.x * 8) {
    Eight sum = {};
#pragma unroll 8
    for (u32 k = 0; k < kChosen; ++k) {
      const Eight result = load(rows + static_cast<u64>(places[k]) * kHidden + i);
      const float weight = weights[k];
#pragma unroll
      for (u32 j = 0; j < 8; ++j) sum.value[j] += weight * result.value[j];
    }
    store(out + static_cast<u64>(token) * kHidden + i, sum);
  }
}

}  // namespace blink

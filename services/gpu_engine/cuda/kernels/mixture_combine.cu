// Ends a mixture-of-experts layer: the sum over a token's experts of weight x result, the largest weight first.
//
// One block a token, eight elements a thread and pass. Bound by memory: 2 kChosen bytes an element and what is written.
//   mixture_combine        the last layer: out = the sum
//   mixture_combine_norm   between layers: added to the residual stream, and the next layer's norm (rms_norm.cuh)
#include "dependent_launch.cuh"
#include "mixture.cuh"
#include "rms_norm.cuh"
#include "step.cuh"

namespace blink {

struct Combined {
  const i32* places;
  const float* weights;
  const bf16* rows;

  __device__ Combined(const MixtureWork& work, const bf16* rows, u32 token)
      : places(work.places + token * kChosen), weights(work.weights + token * kChosen), rows(rows) {}

  __device__ Eight operator()(u32 i) const {
    constexpr u32 kTogether = 8;  // results whose loads are in flight together
    Eight sum = {};
#pragma unroll 1
    for (u32 first = 0; first < kChosen; first += kTogether) {
      uint4 raw[kTogether];
      float weight[kTogether];
#pragma unroll
      for (u32 k = 0; k < kTogether; ++k) {
        const u32 choice = min(first + k, kChosen - 1);
        weight[k] = weights[choice];
        raw[k] = load_raw(rows + static_cast<u64>(places[choice]) * kHidden + i);
      }
#pragma unroll
      for (u32 k = 0; k < kTogether; ++k) {
        if (first + k >= kChosen) break;
        const Eight result = unpack(raw[k]);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) sum.value[j] += weight[k] * result.value[j];
      }
    }
    return sum;
  }
};

extern "C" __global__ void __launch_bounds__(kNormThreads, 4)
    mixture_combine(Step step, MixtureWork work, const bf16* rows, bf16* out) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 token = blockIdx.x;
  if (token >= step.counts->tokens) return;
  const Combined combined(work, rows, token);
  for (u32 i = threadIdx.x * 8; i < kHidden; i += kNormThreads * 8) {
    store(out + static_cast<u64>(token) * kHidden + i, combined(i));
  }
}

extern "C" __global__ void __launch_bounds__(kNormThreads, 4)
    mixture_combine_norm(Step step, MixtureWork work, const bf16* rows, float* residual, const bf16* weight, bf16* out,
                         float eps) {
  let_successor_begin();
  wait_for_predecessor();
  const u64 at = static_cast<u64>(blockIdx.x) * kHidden;
  if (blockIdx.x >= step.counts->tokens) return;
  normalize(residual + at, residual + at, Combined(work, rows, blockIdx.x), weight, out + at, eps);
}

}  // namespace blink

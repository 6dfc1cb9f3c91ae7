// Reductions over a thread block in a fixed order: the same inputs give the same bits whatever else runs.
#pragma once

#include "bf16.cuh"

namespace blink {

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  return value;
}

struct WholeBlock {
  __device__ void operator()() const { __syncthreads(); }
};

// Sum over the block's first kThreads threads, given to all of them; `barrier` is theirs. `scratch` holds kThreads / 32
// floats.
template <u32 kThreads, class Barrier = WholeBlock>
__device__ inline float block_sum(float value, float* scratch, const Barrier& barrier = {}) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  barrier();
  float total = 0.0f;
#pragma unroll
  for (u32 warp = 0; warp < kThreads / 32; ++warp) total += scratch[warp];
  return total;
}

}  // namespace blink

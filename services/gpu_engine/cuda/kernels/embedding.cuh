// One token's row of the embedding, bf16 to the fp32 residual stream, by all threads of a block.
#pragma once

#include "geometry.cuh"
#include "step.cuh"

namespace blink {

__device__ inline void embed(const Step& step, u32 token, const bf16* table, float* residual) {
  const bf16* source = table + static_cast<u64>(step.token_ids[token]) * kHidden;
  float* target = residual + static_cast<u64>(token) * kHidden;
  for (u32 i = threadIdx.x * 8; i < kHidden; i += blockDim.x * 8) store(target + i, load(source + i));
}

}  // namespace blink

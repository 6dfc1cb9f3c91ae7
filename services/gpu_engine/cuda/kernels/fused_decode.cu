// A step of few decoding rows in one kernel (fused_decode.cuh), after one that makes it ready.
//
//   fused_begin    the embedding, and all counters to zero
//   fused_decode   the rest; all its blocks must be resident at once, one on a multiprocessor
#include "fused_decode.cuh"

namespace blink {

extern "C" __device__ u32 fused_shared_bytes = kFusedSharedBytes;
extern "C" __device__ u32 fused_layer_bytes = sizeof(FusedLayer), fused_model_bytes = sizeof(FusedModel);

extern "C" __global__ void __launch_bounds__(128)
    fused_begin(Step step, const bf16* table, float* residual, u32* progress, u32 counters) {
  const u32 token = blockIdx.x;
  for (u32 i = token * blockDim.x + threadIdx.x; i < counters; i += gridDim.x * blockDim.x) progress[i] = 0;
  if (token >= step.counts->tokens) return;
  const bf16* source = table + static_cast<u64>(step.token_ids[token]) * kHidden;
  float* target = residual + static_cast<u64>(token) * kHidden;
  for (u32 i = threadIdx.x * 8; i < kHidden; i += blockDim.x * 8) store(target + i, load(source + i));
}

extern "C" __global__ void __launch_bounds__(kFusedThreads, 1)
    fused_decode(const __grid_constant__ Step step, const __grid_constant__ WorkList work,
                 const __grid_constant__ FusedModel model) {
  extern __shared__ __align__(1024) unsigned char memory[];
  fused_step(memory, step, work, model);
}

}  // namespace blink

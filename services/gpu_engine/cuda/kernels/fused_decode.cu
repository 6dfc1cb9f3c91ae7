// A step of few decoding rows in one kernel (fused_decode.cuh), after one that makes it ready.
//
//   fused_begin    the embedding, and all counters to zero
//   fused_decode   the rest; all its blocks must be resident at once, one on a multiprocessor
#include "embedding.cuh"
#include "fused_decode.cuh"

namespace blink {

extern "C" __device__ u32 fused_shared_bytes = kFusedSharedBytes;
extern "C" __device__ u32 fused_layer_bytes = sizeof(FusedLayer), fused_model_bytes = sizeof(FusedModel);

extern "C" __global__ void __launch_bounds__(128)
    fused_begin(Step step, const bf16* table, float* residual, u32* progress, u32 counters, u32* launch) {
  if (blockIdx.x == 0 && threadIdx.x == 0) ++*launch;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < counters; i += gridDim.x * blockDim.x) progress[i] = 0;
  if (blockIdx.x < step.counts->tokens) embed(step, blockIdx.x, table, residual);
}

extern "C" __global__ void __launch_bounds__(kFusedThreads, 1)
    fused_decode(const __grid_constant__ Step step, const __grid_constant__ WorkList work,
                 const __grid_constant__ FusedModel model) {
  extern __shared__ __align__(1024) unsigned char memory[];
  fused_step(memory, step, work, model);
}

}  // namespace blink

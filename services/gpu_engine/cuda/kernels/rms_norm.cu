// RMSNorm, with the residual add before it (arXiv 1910.07467):
//   r = residual + delta;  out = r / sqrt(mean(r^2) + eps) * weight
// The residual stream is fp32, so that the error of a deep model does not grow with its layers; what the matrix
// products read and write (delta, out) is bf16.
//
// One block a row, the row kept in registers between the two passes; fixed reduction order, so a row's bits do not
// depend on the batch. Bound by memory: 14 bytes an element with the add, 6 without; 80% of an H200's
// bandwidth from 256 rows of 4,096 on.
//   rms_norm       first layer: no delta yet
//   add_rms_norm   between layers: writes r back
//   final_norm     before the logits: gathers the last token of each sampled row, writes nothing back
#include "dependent_launch.cuh"
#include "geometry.cuh"
#include "reduce.cuh"
#include "step.cuh"

namespace blink {

inline constexpr u32 kNormThreads = 256;
inline constexpr u32 kNormPasses = (kHidden + 8 * kNormThreads - 1) / (8 * kNormThreads);

template <bool kAdd, bool kWriteBack>
__device__ inline void normalize(float* residual, const bf16* delta, const bf16* weight, bf16* out, float eps) {
  __shared__ float scratch[kNormThreads / 32];
  Eight row[kNormPasses];
  float squares = 0.0f;
#pragma unroll
  for (u32 pass = 0; pass < kNormPasses; ++pass) {
    const u32 i = (pass * kNormThreads + threadIdx.x) * 8;
    if (i >= kHidden) break;
    row[pass] = load(residual + i);
    if constexpr (kAdd) {
      const Eight added = load(delta + i);
#pragma unroll
      for (u32 k = 0; k < 8; ++k) row[pass].value[k] += added.value[k];
      if constexpr (kWriteBack) store(residual + i, row[pass]);
    }
#pragma unroll
    for (u32 k = 0; k < 8; ++k) squares += row[pass].value[k] * row[pass].value[k];
  }
  const float scale = rsqrtf(block_sum<kNormThreads>(squares, scratch) / kHidden + eps);
#pragma unroll
  for (u32 pass = 0; pass < kNormPasses; ++pass) {
    const u32 i = (pass * kNormThreads + threadIdx.x) * 8;
    if (i >= kHidden) break;
    const Eight factor = load(weight + i);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) row[pass].value[k] *= scale * factor.value[k];
    store(out + i, row[pass]);
  }
}

extern "C" __global__ void __launch_bounds__(kNormThreads)
    rms_norm(Step step, float* residual, const bf16* weight, bf16* out, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  const u64 at = static_cast<u64>(blockIdx.x) * kHidden;
  if (blockIdx.x >= step.counts->tokens) return;
  normalize<false, false>(residual + at, nullptr, weight, out + at, eps);
}

extern "C" __global__ void __launch_bounds__(kNormThreads)
    add_rms_norm(Step step, float* residual, const bf16* delta, const bf16* weight, bf16* out, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  const u64 at = static_cast<u64>(blockIdx.x) * kHidden;
  if (blockIdx.x >= step.counts->tokens) return;
  normalize<true, true>(residual + at, delta + at, weight, out + at, eps);
}

extern "C" __global__ void __launch_bounds__(kNormThreads)
    final_norm(Step step, float* residual, const bf16* delta, const bf16* weight, bf16* out, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  if (blockIdx.x >= step.counts->samples) return;
  const i32 row = step.sample_row[blockIdx.x];
  const u64 at = static_cast<u64>(step.row_start[row + 1] - 1) * kHidden;
  normalize<true, false>(residual + at, delta + at, weight, out + static_cast<u64>(blockIdx.x) * kHidden, eps);
}

}  // namespace blink

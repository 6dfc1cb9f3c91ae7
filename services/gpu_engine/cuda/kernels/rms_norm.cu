// The RMSNorms of a step (rms_norm.cuh), one block a row. Bound by memory: 14 bytes an element with the add, 6 without;
// 80% of an H200's bandwidth from 256 rows of 4,096 on.
//   rms_norm       first layer: no delta yet
//   add_rms_norm   between layers: writes r back
//   final_norm     before the logits: gathers the last token of each sampled row, writes nothing back
#include "dependent_launch.cuh"
#include "rms_norm.cuh"
#include "step.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(kNormThreads)
    rms_norm(Step step, float* residual, const bf16* weight, bf16* out, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  const u64 at = static_cast<u64>(blockIdx.x) * kHidden;
  if (blockIdx.x >= step.counts->tokens) return;
  normalize(residual + at, nullptr, Nothing{}, weight, out + at, eps);
}

extern "C" __global__ void __launch_bounds__(kNormThreads)
    add_rms_norm(Step step, float* residual, const bf16* delta, const bf16* weight, bf16* out, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  const u64 at = static_cast<u64>(blockIdx.x) * kHidden;
  if (blockIdx.x >= step.counts->tokens) return;
  normalize(residual + at, residual + at, Loaded{delta + at}, weight, out + at, eps);
}

extern "C" __global__ void __launch_bounds__(kNormThreads)
    final_norm(Step step, float* residual, const bf16* delta, const bf16* weight, bf16* out, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  if (blockIdx.x >= step.counts->samples) return;
  const i32 row = step.sample_row[blockIdx.x];
  const u64 at = static_cast<u64>(step.row_start[row + 1] - 1) * kHidden;
  normalize(residual + at, nullptr, Loaded{delta + at}, weight, out + static_cast<u64>(blockIdx.x) * kHidden, eps);
}

}  // namespace blink

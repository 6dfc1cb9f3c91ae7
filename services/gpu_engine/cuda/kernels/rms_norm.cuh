// RMSNorm of one row by the first 256 threads of a block, with the residual add before it (arXiv 1910.07467):
//   r = residual + delta;  out = r / sqrt(mean(r^2) + eps) * weight
// The residual stream is fp32, so that the error of a deep model does not grow with its layers; what the matrix
// products read and write (delta, out) is bf16. The row is kept in registers between the two passes; fixed reduction
// order, so a row's bits do not depend on the batch.
#pragma once

#include "geometry.cuh"
#include "reduce.cuh"

namespace blink {

inline constexpr u32 kNormThreads = 256;
inline constexpr u32 kNormPasses = (kHidden + 8 * kNormThreads - 1) / (8 * kNormThreads);

struct Nothing {
  __device__ Eight operator()(u32) const { return {}; }
};

struct Loaded {
  const bf16* delta;
  __device__ Eight operator()(u32 i) const { return load(delta + i); }
};

struct AtOnce {
  __device__ void operator()() const {}
};

// `delta(i)` gives elements i to i + 7 of what is added; r is written to `sum`, if that is not null. `barrier` is that
// of the threads that take part. `await` returns when the residual stream is there; the weights travel meanwhile.
template <class Delta, class Barrier = WholeBlock, class Await = AtOnce>
__device__ inline void normalize(const float* residual, float* sum, const Delta& delta, const bf16* weight, bf16* out,
                                 float eps, const Barrier& barrier = {}, const Await& await = {}) {
  __shared__ float scratch[kNormThreads / 32];
  uint4 weights[kNormPasses];
#pragma unroll
  for (u32 pass = 0; pass < kNormPasses; ++pass) {
    const u32 i = (pass * kNormThreads + threadIdx.x) * 8;
    if (i < kHidden) weights[pass] = load_raw(weight + i);
  }
  await();
  Eight row[kNormPasses];
  float squares = 0.0f;
#pragma unroll
  for (u32 pass = 0; pass < kNormPasses; ++pass) {
    const u32 i = (pass * kNormThreads + threadIdx.x) * 8;
    if (i >= kHidden) break;
    row[pass] = load(residual + i);
    const Eight added = delta(i);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) row[pass].value[k] += added.value[k];
    if (sum) store(sum + i, row[pass]);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) squares += row[pass].value[k] * row[pass].value[k];
  }
  const float scale = rsqrtf(block_sum<kNormThreads>(squares, scratch, barrier) / kHidden + eps);
#pragma unroll
  for (u32 pass = 0; pass < kNormPasses; ++pass) {
    const u32 i = (pass * kNormThreads + threadIdx.x) * 8;
    if (i >= kHidden) break;
    const Eight factor = unpack(weights[pass]);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) row[pass].value[k] *= scale * factor.value[k];
    store(out + i, row[pass]);
  }
}

}  // namespace blink

// One head of a token: its norm (where the model has them, arXiv 2505.09388) and rotary embedding (arXiv 2104.09864).
//
// The kJobs threads of a head are neighbouring lanes, each with sixteen elements as two runs of eight: of a query or
// key head eight rotary pairs (i, i + kHalf), or, beyond the rotated dimensions, elements that stay; of a value head
// any. So a head's sum of squares is a few shuffles, always in one order.
#pragma once

#include "kv_cache.cuh"

namespace blink {

inline constexpr u32 kHalf = kRotaryDim / 2;
inline constexpr u32 kJobs = kHeadDim / 16;      // threads of a head
inline constexpr u32 kTurned = kRotaryDim / 16;  // of them rotate

static_assert(kRotaryDim % 16 == 0 && kRotaryDim <= kHeadDim, "eight rotary pairs a thread");
static_assert((kJobs & (kJobs - 1)) == 0 && kJobs <= 32, "a head's threads are part of a warp");

struct Sixteen {
  Eight low, high;
};

// Where a thread's two runs begin in its head.
struct Runs {
  bool turned;
  u32 low, high;

  __device__ explicit Runs(u32 job)
      : turned(job < kTurned),
        low(turned ? job * 8 : kRotaryDim + (job - kTurned) * 16),
        high(low + (turned ? kHalf : 8)) {}
};

// Divides a head, of which this thread has sixteen elements, by its root mean square.
__device__ inline void norm_head(Sixteen& x, const bf16* weight, const Runs& runs, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (u32 k = 0; k < 8; ++k) squares += x.low.value[k] * x.low.value[k] + x.high.value[k] * x.high.value[k];
  const u32 lane = threadIdx.x % 32, mask = 0xFFFFFFFFu >> (32 - kJobs) << lane / kJobs * kJobs;
#pragma unroll
  for (u32 distance = 1; distance < kJobs; distance *= 2) squares += __shfl_xor_sync(mask, squares, distance);
  const float scale = rsqrtf(squares / kHeadDim + eps);
  const Eight low_weight = load(weight + runs.low), high_weight = load(weight + runs.high);
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    x.low.value[k] *= scale * low_weight.value[k];
    x.high.value[k] *= scale * high_weight.value[k];
  }
}

__device__ inline void turn(Sixteen& x, const float2* turns) {
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    const float a = x.low.value[k], b = x.high.value[k];
    x.low.value[k] = a * turns[k].x - b * turns[k].y;
    x.high.value[k] = b * turns[k].x + a * turns[k].y;
  }
}

__device__ inline void divide(Sixteen& x, float scale) {
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    x.low.value[k] /= scale;
    x.high.value[k] /= scale;
  }
}

// The elements of a head where they lie.
struct StoredHead {
  const bf16* head;
  __device__ uint4 operator()(u32 i) const { return load_raw(head + i); }
};

// A query or key head to `target`; source(i) gives elements i to i + 7, in bf16, `weight` is its norm's or null,
// `turns` the position's (cos, sin). Codes are of what is left after a division by `scale`.
template <class Source, class Target>
__device__ inline void rotate_head(const Source& source, Target* target, u32 job, const bf16* weight,
                                   const float2* turns, float eps, float scale = 1.0f) {
  const Runs runs(job);
  Sixteen x = {unpack(source(runs.low)), unpack(source(runs.high))};
  if (weight) norm_head(x, weight, runs, eps);
  if (runs.turned) turn(x, turns + runs.low);
  if constexpr (kIsCode<Target>) divide(x, scale);
  store(target + runs.low, x.low);
  store(target + runs.high, x.high);
}

template <class Source, class Target>
__device__ inline void copy_head(const Source& source, Target* target, u32 job, float scale) {
  const Runs runs(job);
  if constexpr (kIsCode<Target>) {
    Sixteen x = {unpack(source(runs.low)), unpack(source(runs.high))};
    divide(x, scale);
    store(target + runs.low, x.low);
    store(target + runs.high, x.high);
  } else {
    store_raw(target + runs.low, source(runs.low));
    store_raw(target + runs.high, source(runs.high));
  }
}

}  // namespace blink

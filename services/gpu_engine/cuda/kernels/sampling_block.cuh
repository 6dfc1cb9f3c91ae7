// A thread block that samples one row: its logits as penalties leave them, and reductions in a fixed order.
#pragma once

#include "sampling_weight.cuh"

namespace blink {

inline constexpr u32 kSampleThreads = 1024;
inline constexpr u32 kSampleWarps = kSampleThreads / 32;

inline constexpr u32 kMarkSeen = 1u << 31;        // in prompt or output
inline constexpr u32 kMarkSuppressed = 1u << 30;  // must not be chosen
inline constexpr u32 kMarkUses = kMarkSuppressed - 1;

// A row's logits after penalties and suppression. `marks` [vocabulary] says what happens to each token; null: nothing.
struct Logits {
  const float* raw;
  const u32* marks;
  float repetition_penalty, presence_penalty, frequency_penalty;

  __device__ float adjusted(float logit, u32 mark) const {
    if (mark & kMarkSeen) {
      logit = logit > 0.0f ? __fdiv_rn(logit, repetition_penalty) : __fmul_rn(logit, repetition_penalty);
      if (const u32 uses = mark & kMarkUses) {
        logit = __fsub_rn(logit, __fmul_rn(frequency_penalty, static_cast<float>(uses)));
        logit = __fsub_rn(logit, presence_penalty);
      }
    }
    return mark & kMarkSuppressed ? minus_infinity() : logit;
  }

  // f(token, logit) for every token, four in a row to a thread. More loads are in flight with a larger kUnroll.
  template <u32 kUnroll = 1, class F>
  __device__ void each(F f) const {
#pragma unroll kUnroll
    for (u32 first = threadIdx.x * 4; first < kVocabulary; first += kSampleThreads * 4) {
      float logit[4];
      four(first, logit);
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        if (kVocabulary % 4 == 0 || first + k < kVocabulary) f(first + k, logit[k]);
      }
    }
  }

  // Logits of tokens first to first + 3; beyond the vocabulary NaN, which nothing chooses.
  __device__ void four(u32 first, float (&logit)[4]) const {
    if constexpr (kVocabulary % 4 == 0) {
      const float4 raw4 = *reinterpret_cast<const float4*>(raw + first);
      logit[0] = raw4.x, logit[1] = raw4.y, logit[2] = raw4.z, logit[3] = raw4.w;
    } else {
      for (u32 k = 0; k < 4; ++k) logit[k] = first + k < kVocabulary ? raw[first + k] : __int_as_float(0x7FFFFFFF);
    }
    if (marks == nullptr) return;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      if (kVocabulary % 4 == 0 || first + k < kVocabulary) logit[k] = adjusted(logit[k], __ldcg(marks + first + k));
    }
  }
};

template <class T>
__device__ inline T shuffle_down(T value, u32 distance) {
  return __shfl_down_sync(0xFFFFFFFFu, value, distance);
}

// Combines every thread's value, in an order that depends on nothing; all threads get the result.
template <class T, class Combine>
__device__ inline T block_combine(T value, Combine combine) {
  __shared__ T of_warp[kSampleWarps];
  __shared__ T result;
#pragma unroll
  for (u32 distance = 16; distance > 0; distance /= 2) value = combine(value, shuffle_down(value, distance));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = of_warp[threadIdx.x];
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value = combine(value, shuffle_down(value, distance));
    if (threadIdx.x == 0) result = value;
  }
  __syncthreads();
  const T all = result;
  __syncthreads();
  return all;
}

__device__ inline u64 block_largest(u64 value) {
  return block_combine(value, [](u64 a, u64 b) { return a < b ? b : a; });
}

template <class T>
__device__ inline T block_total(T value) {
  return block_combine(value, [](T a, T b) { return a + b; });
}

// Sum of the values of lower threads.
__device__ inline u64 block_before(u64 value) {
  __shared__ u64 of_warp[kSampleWarps];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 inclusive = value;
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u64 lower = __shfl_up_sync(0xFFFFFFFFu, inclusive, distance);
    if (lane >= distance) inclusive += lower;
  }
  if (lane == 31) of_warp[warp] = inclusive;
  __syncthreads();
  u64 before = inclusive - value;
  for (u32 w = 0; w < warp; ++w) before += of_warp[w];
  __syncthreads();
  return before;
}

}  // namespace blink

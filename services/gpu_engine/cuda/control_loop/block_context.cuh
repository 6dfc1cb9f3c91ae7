// The scheduling core's execution context as one thread block.
//
// It has no state of its own, so that passing it to functions that are not inlined costs nothing: what reductions
// exchange lies in one static piece of shared memory.
#pragma once

#include "services/gpu_engine/core/context.hpp"

namespace blink::cuda {

using core::Scan;
using core::u32;
using core::u64;

template <u32 kThreads>
class BlockContext {
 public:
  static constexpr u32 kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps of one block");

  __device__ u32 thread() const { return threadIdx.x; }
  __device__ constexpr u32 threads() const { return kThreads; }
  __device__ void barrier() const { __syncthreads(); }

  __device__ Scan exclusive(u64 value) const {
    const u64 inclusive = warp_inclusive(value);
    Scan scan{inclusive - value, 0};
    exchange(inclusive, 31, [&](u32 other, u64 word) {
      if (other < warp()) scan.before += word;
      scan.total += word;
    });
    return scan;
  }

  __device__ u64 sum(u64 value) const {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAll, value, distance);
    u64 total = 0;
    exchange(value, 0, [&](u32, u64 word) { total += word; });
    return total;
  }

  __device__ u32 min(u32 value) const {
    u64 least = core::kNone;
    exchange(__reduce_min_sync(kAll, value), 0, [&](u32, u64 word) { least = core::smaller(least, word); });
    return static_cast<u32>(least);
  }

  // Warps sum by key, then one thread a key adds the warps up: three barriers, however many keys and threads.
  template <class Take>
  __device__ core::Claimed claim(u32 key, u64 amount, u32 keys, bool active, Take take) const {
    __shared__ u64 sums[kWarps][core::kMaxKeys];
    __shared__ u64 bases[core::kMaxKeys];
    const u32 group = __match_any_sync(kAll, active ? key : core::kNone);
    const Scan mine = group_exclusive(group, amount);
    for (u32 other = lane(); other < keys; other += 32) sums[warp()][other] = 0;
    __syncwarp();
    if (active && lane() == __ffs(group) - 1) sums[warp()][key] = mine.total;
    __syncthreads();
    for (u32 served = threadIdx.x; served < keys; served += kThreads) {
      u64 total = 0;
#pragma unroll
      for (u32 other = 0; other < kWarps; ++other) {
        const u64 theirs = sums[other][served];
        sums[other][served] = total;
        total += theirs;
      }
      if (total != 0) bases[served] = take(served, total);
    }
    __syncthreads();
    core::Claimed claimed{0, 0};
    if (active && amount != 0) claimed = {bases[key], sums[warp()][key] + mine.before};
    __syncthreads();
    return claimed;
  }

 private:
  static constexpr u32 kAll = 0xFFFFFFFF;

  __device__ static u32 lane() { return threadIdx.x % 32; }
  __device__ static u32 warp() { return threadIdx.x / 32; }

  __device__ static u64 warp_inclusive(u64 value) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u64 lower = __shfl_up_sync(kAll, value, distance);
      if (lane() >= distance) value += lower;
    }
    return value;
  }

  // Sums over the lower lanes of this lane's group, and over the whole group.
  __device__ static Scan group_exclusive(u32 group, u64 value) {
    const u32 below = group & ((1u << lane()) - 1);
    const u64 common = __shfl_sync(kAll, value, __ffs(group) - 1);
    if (__all_sync(kAll, value == common)) return {common * __popc(below), common * __popc(group)};
    Scan scan{0, 0};
    for (u32 other = 0; other < 32; ++other) {
      const u64 theirs = __shfl_sync(kAll, value, other);
      if ((group >> other & 1) == 0) continue;
      scan.total += theirs;
      if (other < lane()) scan.before += theirs;
    }
    return scan;
  }

  // use(warp, the value that lane `from` of that warp gave) for each warp.
  template <class Use>
  __device__ static void exchange(u64 value, u32 from, Use use) {
    __shared__ u64 words[kWarps];
    if (lane() == from) words[warp()] = value;
    __syncthreads();
#pragma unroll
    for (u32 other = 0; other < kWarps; ++other) use(other, words[other]);
    __syncthreads();
  }
};

}  // namespace blink::cuda

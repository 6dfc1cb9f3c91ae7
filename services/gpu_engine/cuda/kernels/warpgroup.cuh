// Warpgroups of a block: four warps each, with hardware barriers of their own.
#pragma once

#include "bf16.cuh"

namespace blink {

inline constexpr u32 kWarps = 4;  // of a warpgroup
inline constexpr u32 kWarpgroup = kWarps * 32;

__device__ inline u32 warp_in_group() { return threadIdx.x / 32 % kWarps; }
__device__ inline u32 thread_in_group() { return threadIdx.x % kWarpgroup; }

// Hardware barriers.
inline constexpr u32 kBlock = 0;  // the whole block; __syncthreads is this one too
inline constexpr u32 kTurn = 1;   // + consumer: it may issue its products
inline constexpr u32 kAlone = 3;  // + warpgroup: its own threads

// Waits for `threads` threads at the barrier, this one among them.
__device__ inline void wait_at(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as one of the `threads` that others wait for.
__device__ inline void arrive_at(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void synchronize_warpgroup() { wait_at(kAlone + threadIdx.x / kWarpgroup, kWarpgroup); }

}  // namespace blink

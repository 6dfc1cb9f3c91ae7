// Clusters of two blocks: neighbours in the grid that reach each other's shared memory (sm_90 and later). What has an
// address in this block's shared memory has the same one in the other's.
#pragma once

#include "tma.cuh"

namespace blink {

inline constexpr u32 kClusterBlocks = 2;
inline constexpr u32 kAllOfCluster = (1u << kClusterBlocks) - 1;

__device__ inline u32 rank_in_cluster() { return blockIdx.x % kClusterBlocks; }

// Waits for all threads of both blocks: so that barriers are there before the other block uses them, and until it does
// so no more.
__device__ inline void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the barrier of the block of this rank.
__device__ inline void arrive_in_block(CopyBarrier& barrier, u32 rank) {
  asm volatile(
      "{ .reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// `copy_box` into the shared memory of both blocks; each one's own barrier counts the bytes.
__device__ inline void copy_box_to_all(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&done)), "h"(static_cast<u16>(kAllOfCluster))
      : "memory");
}

__device__ inline void copy_box_to_all(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z,
                                       u32 w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(&done)), "h"(static_cast<u16>(kAllOfCluster))
      : "memory");
}

}  // namespace blink

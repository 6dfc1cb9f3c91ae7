// Thread block clusters (sm_90): blocks of one graphics processing cluster, which reach each other's shared memory. A
// kernel launched without one is a cluster of one block.
#pragma once

#include "bf16.cuh"

namespace blink {

__device__ inline u32 blocks_of_cluster() {
  u32 blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

__device__ inline u32 block_of_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster, but doesn't publish what they wrote.
__device__ inline void wait_for_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace blink

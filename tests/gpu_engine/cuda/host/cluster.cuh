// Clusters of kernels/cluster.cuh in C++: the blocks of one have parts of the same memory (launch_clusters).
#pragma once

#include "tma.cuh"

namespace blink {

inline constexpr u32 kClusterBlocks = 2, kBlockMemory = 256 << 10;

inline u32 rank_in_cluster() { return blockIdx.x % kClusterBlocks; }
inline unsigned char* block_memory(u32 rank) { return dynamic_memory + rank * kBlockMemory; }
inline void synchronize_cluster() { block_barrier->wait(); }

// What lies in the block of this rank where `mine` lies in this one.
template <class T>
T* in_block(T* mine, u32 rank) {
  const u64 offset = reinterpret_cast<uintptr_t>(mine) - reinterpret_cast<uintptr_t>(dynamic_memory);
  return reinterpret_cast<T*>(block_memory(rank) + offset % kBlockMemory);
}

inline void arrive_in_block(CopyBarrier& barrier, u32 rank) { in_block(&barrier, rank)->arrive(); }

inline void copy_box_to_all(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z = 0, u32 w = 0) {
  for (u32 rank = 0; rank < kClusterBlocks; ++rank) {
    copy_box(in_block(target, rank), map, *in_block(&done, rank), x, y, z, w);
  }
}

}  // namespace blink

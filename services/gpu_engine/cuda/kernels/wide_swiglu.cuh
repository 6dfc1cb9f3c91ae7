// out = silu(X gate^T) * (X up^T) for many tokens, by the tensor cores: X [tokens, depth], W [2 outputs, depth] gate
// over up, out [tokens, outputs] in bf16. Bit for bit what a product with W and swiglu.cu make of it.
//
// A block computes tiles of kTileTokens x kTileRows sums, two warpgroups a half each: tokens are the rows of their
// wgmma products, rows of W the columns, of which a tile may have any multiple of 32, so that few large tiles come out
// even. In a tile eight rows of the gate's come before the same eight of the up's: both factors of an output are a
// thread's. A third warpgroup has one thread that copies X and W by TMA through a ring of stages of 64 columns, on into
// the next tile while the outputs of this one are written.
//
// The two blocks of a cluster have neighbouring tiles, of the same rows of W or of the same tokens. Each copies half of
// what both need into both, which makes a quarter to a third less for the L2 cache to deliver: it is the next limit
// behind the tensor cores. Clusters walk the tiles in bands of tokens, tokens first: the weights come from memory once
// a band, and what runs at a time shares what is in the L2 cache.
//
// Every sum runs over k in order, 16 at a time, in one accumulator, as in skinny_gemm.cuh: a row has the same bits.
#pragma once

#include "dependent_launch.cuh"
#include "slot.cuh"
#include "wgmma_wide.cuh"
#include "wide_ending.cuh"

namespace blink {

struct WideShared {
  CopyBarrier full[kStages], empty[kStages];
  alignas(kBarrierBytes) unsigned char slices[kConsumers * kWarps][kSliceBytes];
  alignas(1024) unsigned char stages[kStages][kStageBytes];  // X, then W
};
static_assert(sizeof(WideShared) <= kSharedBytes);

// A box into this block, or into both.
template <class... Place>
__device__ inline void copy_box_for(bool both, void* target, const TensorMap& map, CopyBarrier& done, Place... place) {
  if (both) {
    copy_box_to_all(target, map, done, place...);
  } else {
    copy_box(target, map, done, place...);
  }
}

// Calls copy(target, first row) for both halves of an operand's part of a stage; where the blocks share the operand,
// for this block's half, which then goes to both.
template <u32 kRows, class Copy>
__device__ inline void copy_halves(unsigned char* target, bool shared, const Copy& copy) {
  constexpr u32 kHalf = kRows / 2;
  static_assert(kHalf * kRowBytes % 1024 == 0);
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    if (!shared || half == rank_in_cluster()) copy(target + half * kHalf * kRowBytes, half * kHalf);
  }
}

__device__ inline void produce(WideShared& shared, const TensorMap& weight, const TensorMap& x,
                               const WideProblem& problem) {
  let_successor_begin();
  prefetch_map(weight);
  prefetch_map(x);
  wait_for_predecessor();  // of the weights too: they may be what it has dequantized
  const bool same_rows = problem.same_rows;
  Slot slot;
  for_each_tile(problem, [&](const WideTile& tile) {
    for (u32 chunk = 0; chunk < problem.chunks; ++chunk, slot.advance(kStages)) {
      shared.empty[slot.stage].wait(slot.parity ^ 1);  // in both blocks
      CopyBarrier& full = shared.full[slot.stage];
      full.arrive_expecting(kStageBytes);
      unsigned char* stage = shared.stages[slot.stage];
      const u32 column = chunk * kDepth;
      copy_halves<kTileTokens>(stage, !same_rows, [&](void* target, u32 first) {
        copy_box_for(!same_rows, target, x, full, column, tile.token + first);
      });
      copy_halves<kTileRows>(stage + kXBytes, same_rows, [&](void* target, u32 first) {
        copy_box_for(same_rows, target, weight, full, column, 0u, 0u, (tile.row + first) / 16);
      });
    }
  });
}

__device__ inline void consume(WideShared& shared, const WideProblem& problem, bf16* out) {
  const u32 group = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 first_token = group % kTokenGroups * kProductTokens, first_row = group / kTokenGroups * kColumns;
  Slot slot, oldest;  // oldest: the first not given back
  const auto give_back = [&] {
    if (lane < kClusterBlocks) arrive_in_block(shared.empty[oldest.stage], lane);
    oldest.advance(kStages);
  };
  wait_for_predecessor();
  for_each_tile(problem, [&](const WideTile& tile) {
    WideSums sums = {};
    for (u32 chunk = 0; chunk < problem.chunks; ++chunk, slot.advance(kStages)) {
      shared.full[slot.stage].wait(slot.parity);
      const u32 stage = shared_address(shared.stages[slot.stage]);
      const u64 a = operand(stage + first_token * kRowBytes, 1024);
      const u64 b = operand(stage + kXBytes + first_row * kRowBytes, 1024);
      begin_products();
#pragma unroll
      for (u32 k = 0; k < kDepth / 16; ++k) multiply_wide(sums, a + 2 * k, b + 2 * k);  // 16-byte units
      commit_products();
      wait_products<1>();
      if (chunk > 0) give_back();
    }
    wait_products<0>(sums);
    give_back();
    const u32 token = tile.token + first_token + warp % kWarps * 16;
    write_swiglu(out, sums, shared.slices[warp], problem, token, (tile.row + first_row) / 2);
  });
}

__device__ inline void multiply_swiglu(unsigned char* memory, const TensorMap& weight, const TensorMap& x,
                                       const WideProblem& problem, bf16* out) {
  WideShared& shared = *reinterpret_cast<WideShared*>(memory);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kClusterBlocks * kConsumers * kWarps);
    }
    fence_barrier_init();
  }
  synchronize_cluster();
  if (threadIdx.x / kWarpgroup == kConsumers) {
    yield_registers<kProducerRegisters>();
    if (thread_in_group() == 0) produce(shared, weight, x, problem);
    __syncwarp();
  } else {
    grab_registers<kConsumerRegisters>();
    consume(shared, problem, out);
  }
  synchronize_cluster();
}

}  // namespace blink

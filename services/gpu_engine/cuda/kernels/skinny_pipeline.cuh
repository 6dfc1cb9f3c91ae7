// What the skinny products share, whatever their weights: a launch's shape, the ring, the thread that fills it.
#pragma once

#include "dependent_launch.cuh"
#include "slot.cuh"
#include "tma.cuh"

namespace blink {

inline constexpr u32 kTokens = BLINK_SKINNY_TOKENS;
inline constexpr u32 kRowBytes = 128;  // of a stage: the swizzle's width
inline constexpr u32 kGroupRows = 64;  // of a warpgroup
inline constexpr u32 kProducerWarp = 8;
inline constexpr u32 kThreads = 288;
inline constexpr u32 kMostStages = 60;
inline constexpr u32 kBoxColumns = 64;                   // of X in a box
inline constexpr u32 kTokenBytes = kTokens * kRowBytes;  // of a box

// skinny_gemm.py fills it.
struct Problem {
  u32 tokens, outputs;  // of Y
  u32 rows;             // of a tile, a multiple of 16
  u32 run;              // tiles of a block
  u32 chunks;           // stages of a tile
  u32 stages;           // of the ring
};

// Before the ring.
struct alignas(1024) SkinnyBarriers {
  CopyBarrier full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(SkinnyBarriers) == 1024, "as skinny_schedule.py counts it");

// A stage is `rows` rows of W, then kBoxes boxes of X.
template <u32 kBoxes>
struct Ring {
  SkinnyBarriers& barriers;
  u32 stages, weight_bytes;

  __device__ u32 stage_bytes() const { return weight_bytes + kBoxes * kTokenBytes; }
  __device__ unsigned char* weight(u32 stage) const {
    return reinterpret_cast<unsigned char*>(&barriers + 1) + stage * stage_bytes();
  }
  __device__ unsigned char* x(u32 stage) const { return weight(stage) + weight_bytes; }
};

// A chunk of the block's run, with the tile's first row.
struct Cursor {
  u32 row, chunk = 0;

  __device__ void advance(const Problem& problem) {
    if (++chunk == problem.chunks) chunk = 0, row += problem.rows;
  }
};

template <class Layout, u32 kBoxes>
__device__ inline void produce(const Ring<kBoxes>& ring, const TensorMap& weight, const TensorMap& x,
                               const Problem& problem) {
  const u32 count = problem.run * problem.chunks, first = min(count, ring.stages);
  Cursor at{blockIdx.x * problem.run * problem.rows};
  const auto copy_weight = [&](u32 stage) {
    ring.barriers.full[stage].arrive_expecting(ring.stage_bytes());
    Layout::copy(ring.weight(stage), weight, ring.barriers.full[stage], at);
  };
  const auto copy_x = [&](u32 stage, u32 chunk) {
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
      const u32 column = (chunk * kBoxes + box) * kBoxColumns;
      copy_box(ring.x(stage) + box * kTokenBytes, x, ring.barriers.full[stage], column, 0);
    }
  };

  let_successor_begin();
  for (u32 i = 0; i < first; ++i, at.advance(problem)) copy_weight(i);
  prefetch_map(x);
  wait_for_predecessor();
  for (u32 i = 0; i < first; ++i) copy_x(i, i % problem.chunks);
  Slot slot{first == ring.stages ? 0 : first, 0};
  for (u32 i = first; i < count; ++i, at.advance(problem), slot.advance(ring.stages)) {
    ring.barriers.empty[slot.stage].wait(slot.parity);
    copy_weight(slot.stage);
    copy_x(slot.stage, at.chunk);
  }
}

// A block: one thread fills the ring, as many warpgroups as a tile has rows for call consume(ring).
template <class Layout, u32 kBoxes, class Consume>
__device__ inline void run_pipeline(unsigned char* memory, const TensorMap& weight, const TensorMap& x,
                                    const Problem& problem, Consume consume) {
  const Ring<kBoxes> ring{*reinterpret_cast<SkinnyBarriers*>(memory), problem.stages, problem.rows * kRowBytes};
  const u32 groups = (problem.rows + kGroupRows - 1) / kGroupRows;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < problem.stages; ++i) {
      ring.barriers.full[i].init(1);
      ring.barriers.empty[i].init(groups * 4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const u32 warp = threadIdx.x / 32;
  if (warp == kProducerWarp) {
    if (threadIdx.x % 32 == 0) produce<Layout>(ring, weight, x, problem);
  } else {
    wait_for_predecessor();
    if (warp < groups * 4) consume(ring);
  }
}

using Sums = float[kTokens / 2];

}  // namespace blink

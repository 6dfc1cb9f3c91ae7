// What the skinny products share, whatever their weights: a launch's shape, the ring's barriers, and the walk through
// it.
#pragma once

#include "tma.cuh"

namespace blink {

inline constexpr u32 kTokens = BLINK_SKINNY_TOKENS;
inline constexpr u32 kRowBytes = 128;  // of a stage: the swizzle's width
inline constexpr u32 kGroupRows = 64;  // of a warpgroup
inline constexpr u32 kProducerWarp = 8;
inline constexpr u32 kThreads = 288;
inline constexpr u32 kMostStages = 60;

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

// A stage of the ring, and the parity of its phase.
struct Slot {
  u32 stage = 0, parity = 0;

  __device__ void advance(u32 stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// A chunk of the block's run, with the tile's first row.
struct Cursor {
  u32 row, chunk = 0;

  __device__ void advance(const Problem& problem) {
    if (++chunk == problem.chunks) chunk = 0, row += problem.rows;
  }
};

using Sums = float[kTokens / 2];

}  // namespace blink

// How a wide product is divided: stages, tiles, and who computes which (wide_swiglu.cuh).
#pragma once

#include "cluster.cuh"
#include "warpgroup.cuh"

namespace blink {

inline constexpr u32 kTileTokens = BLINK_WIDE_TOKENS, kTileRows = BLINK_WIDE_ROWS;
inline constexpr u32 kConsumers = 2;                                    // warpgroups
inline constexpr u32 kProductTokens = 64;                               // of a warpgroup's product
inline constexpr u32 kTokenGroups = kTileTokens / kProductTokens;       // warpgroups with tokens of their own
inline constexpr u32 kColumns = kTileRows * kTokenGroups / kConsumers;  // of a warpgroup's product
inline constexpr u32 kDepth = 64;                                       // columns of a stage
inline constexpr u32 kRowBytes = 2 * kDepth;                            // of a stage: the swizzle's width
static_assert(kTokenGroups == 1 || kTokenGroups == 2);
static_assert(kTileRows % 32 == 0 && kColumns <= 256);

inline constexpr u32 kWideThreads = (kConsumers + 1) * kWarpgroup;
inline constexpr u32 kProducerRegisters = 40, kConsumerRegisters = 232;

inline constexpr u32 kXBytes = kTileTokens * kRowBytes, kWeightBytes = kTileRows * kRowBytes;  // of a stage
inline constexpr u32 kStageBytes = kXBytes + kWeightBytes;

// Of a warp, between its sums and the rows of out: 16 rows of eight pieces of 16 bytes.
inline constexpr u32 kSlicePieces = 8;
inline constexpr u32 kSliceBytes = 16 * kSlicePieces * 16;
inline constexpr u32 kSlicesBytes = kConsumers * kWarps * kSliceBytes;

inline constexpr u32 kBarrierBytes = 1024;
inline constexpr u32 kSharedBytes = 224 << 10;  // as wide_schedule.py has it
inline constexpr u32 kStages = (kSharedBytes - kBarrierBytes - kSlicesBytes) / kStageBytes;

inline constexpr u32 kBand = 8;  // pairs of tiles along the tokens

// wide_swiglu.py fills it.
struct WideProblem {
  u32 tokens, outputs;         // of out
  u32 chunks;                  // stages of a tile
  u32 token_pairs, row_pairs;  // how many pairs of tiles lie along the tokens and along the rows of W
  u32 same_rows;               // a pair's tiles have the same rows of W, else the same tokens
};

// What a block computes at a time: the first of its tokens, and of its rows of W.
struct WideTile {
  u32 token, row;
};

__device__ inline WideTile tile_of(const WideProblem& problem, u32 pair) {
  const u32 first = pair / (kBand * problem.row_pairs) * kBand, place = pair - first * problem.row_pairs;
  const u32 width = min(kBand, problem.token_pairs - first), rank = rank_in_cluster();
  const u32 token = first + place % width, row = place / width;
  if (problem.same_rows) return {(kClusterBlocks * token + rank) * kTileTokens, row * kTileRows};
  return {token * kTileTokens, (kClusterBlocks * row + rank) * kTileRows};
}

// Calls visit(tile) for every tile of this block.
template <class Visit>
__device__ inline void for_each_tile(const WideProblem& problem, const Visit& visit) {
  const u32 pairs = problem.token_pairs * problem.row_pairs;
  for (u32 pair = blockIdx.x / kClusterBlocks; pair < pairs; pair += gridDim.x / kClusterBlocks) {
    visit(tile_of(problem, pair));
  }
}

using WideSums = float[kColumns / 2];  // of a thread

}  // namespace blink

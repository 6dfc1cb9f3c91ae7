// The attention work list: what plan_attention writes once a step and attention reads in every layer.
//
// A row of one token is a decode row: its keys are split among warpgroups. Any other row is a prefill chunk: its
// queries are tiled. Where a split or a tile begins depends on the row alone, never on the batch.
#pragma once

#include "geometry.cuh"

namespace blink {

inline constexpr u32 kTileRows = 128;                   // (token, query head of the group) pairs of a prefill tile
inline constexpr u32 kTileTokens = kTileRows / kGroup;  // whole tokens that fit
inline constexpr u32 kMinSplit = 256, kMaxSplits = 64;  // keys of a split at least; splits of a row at most

inline constexpr u32 kPieces = kHeadDim / 8;  // 16-byte pieces of a key

// All that a block needs to know of its item: one 32-byte load.
struct alignas(32) WorkItem {
  u32 row;
  u32 line;       // of the page table
  u32 token;      // first of the row in the step
  u32 tokens;     // of the row
  u32 kv_length;  // of the row
  u32 first;      // prefill: first token of the tile, counted in the row; decode: first key of the split
  u32 partial;    // decode: of the row's first split among all splits
  u32 split;      // decode: which split of the row
};

struct WorkList {
  u32* counts;         // prefill tiles, decode splits
  WorkItem* tiles;     // [max_tokens / kTileTokens + max_rows]
  WorkItem* splits;    // [max_rows x splits of the longest context]
  u32* tickets;        // [layers, tiles and splits] items taken of each layer's launch beyond those it begins with
  u32* arrivals;       // [max_rows, kKvHeads] splits done; 0 between launches
  float* partial_out;  // [splits, kHeads, kHeadDim] not yet divided by the sum
  float2* partial_ml;  // [splits, kHeads] (maximum in log2 units, sum)
};

// Keys of each split: a function of the sequence's length alone, so that a row's result is too.
__device__ inline u32 split_keys(u32 kv_length) {
  const u32 per_split = (kv_length + kMaxSplits - 1) / kMaxSplits;
  return per_split <= kMinSplit ? kMinSplit : (per_split + kMinSplit - 1) / kMinSplit * kMinSplit;
}

__device__ inline u32 split_count(u32 kv_length) {
  const u32 keys = split_keys(kv_length);
  return (kv_length + keys - 1) / keys;
}

}  // namespace blink

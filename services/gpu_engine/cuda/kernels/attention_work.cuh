// The attention work list: what plan_attention writes once a step and attention reads in every layer.
//
// A row of one token is a decode row: its keys are split among warpgroups. Any other row is a prefill chunk: its
// queries are tiled, and the keys of a tile that sees many are summed in segments, so that blocks can share them. Where
// a split begins depends on the row's length alone, where a segment begins on nothing: never on the batch.
#pragma once

#include "geometry.cuh"

namespace blink {

inline constexpr u32 kTileRows = 128;                   // (token, query head of the group) pairs of a prefill tile
inline constexpr u32 kTileTokens = kTileRows / kGroup;  // whole tokens that fit
inline constexpr u32 kBlockKeys = 128;                  // a tile's keys come in blocks of so many
inline constexpr u32 kMinSplit = 512, kMaxSplits = 64;  // keys of a split at least; splits of a row at most
inline constexpr u32 kWhole = ~0u;                      // in place of a slot: all segments of a tile in one item

inline constexpr u32 kPieces = kHeadDim / 8;  // 16-byte pieces of a key

// All that a block needs to know of its item: one 32-byte load.
struct alignas(32) WorkItem {
  u32 row;
  u32 line;       // of the page table
  u32 token;      // first of the row in the step
  u32 tokens;     // of the row
  u32 kv_length;  // of the row
  u32 first;      // prefill: first token of the tile, counted in the row; decode: first key of the split
  u32 partial;    // prefill: slot of the tile's first segment, or kWhole; decode: the row's first split among all
  u32 split;      // prefill: which segment of the tile; decode: which split of the row
};

struct WorkList {
  u32* counts;         // prefill items, decode splits
  WorkItem* tiles;     // [max_tokens / kTileTokens + max_rows + slots] prefill items, the longest first
  WorkItem* splits;    // [max_rows x splits of the longest context]
  u32* tickets;        // [layers, tiles and splits] items taken of each layer's launch beyond those it begins with
  u32* arrivals;       // [max_rows, kKvHeads] splits done; 0 between launches
  float* partial_out;  // [splits, kHeads, kHeadDim] not yet divided by the sum
  float2* partial_ml;  // [splits, kHeads] (maximum in log2 units, sum)
  // Segments of tiles: a slot has one of every KV head. Behind the slots, `segments` of one KV head for each block of
  // the grid. attention_segments.cuh has the layout of each.
  float4* segment_out;
  float4* segment_ml;
  u32* segment_arrivals;  // [slots, kKvHeads, 2] segments done, at a tile's first slot; 0 between launches
  u32 segment_blocks;     // of keys
  u32 segments;           // of the longest context
  u32 slots;
};

// Blocks of keys that a tile's last token sees.
__device__ inline u32 tile_blocks(const WorkItem& item) {
  const u32 end = item.kv_length - item.tokens + min(item.first + kTileTokens, item.tokens);
  return (end + kBlockKeys - 1) / kBlockKeys;
}

// Segments of so many blocks of keys.
__device__ inline u32 segment_count(const WorkList& work, u32 blocks) {
  return (blocks + work.segment_blocks - 1) / work.segment_blocks;
}

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

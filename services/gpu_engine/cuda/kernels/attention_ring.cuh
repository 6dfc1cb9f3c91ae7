// What a prefill tile reads, on its way through shared memory: rings of queries, keys and values, and the warp that
// fills them by boxes of tensor maps, a page of a KV head at a time.
#pragma once

#include "attention_work.cuh"
#include "step.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

namespace blink {

inline constexpr u32 kRing = 2;      // tiles of queries, blocks of keys, blocks of values in flight
inline constexpr u32 kColumns = 64;  // of a swizzle atom: 128 bytes
inline constexpr u32 kHalves = kHeadDim / kColumns;
inline constexpr u32 kAtom = 8 * kColumns;  // 8 rows
inline constexpr u32 kBlockPages = kBlockKeys / kPageSize;
inline constexpr u32 kConsumers = 2, kConsumerRows = 64;
inline constexpr u32 kProducerRegisters = 40, kConsumerRegisters = 232, kEqualRegisters = 168;

static_assert(kConsumers * kConsumerRows == kTileRows, "64 rows of a tile for each consumer");
static_assert(kPageSize <= kBlockKeys, "whole pages fill a block");

struct Tile {
  WorkItem item;
  u32 kv_head;
  u32 begin, end;  // blocks of keys; the end is 0 after the last tile
  u32 segments;    // of the whole tile
};

struct PrefillShared {
  // Queries are [half][row][kColumns], keys and values [8 keys][half][key % 8][kColumns]: pages follow each other.
  alignas(1024) bf16 queries[kRing][kHalves][kTileRows * kColumns];
  alignas(1024) bf16 keys[kRing][kBlockKeys * kHeadDim];
  alignas(1024) bf16 values[kRing][kBlockKeys * kHeadDim];
  Tile tile[kRing];
  u32 last[kConsumers];
  CopyBarrier queries_full[kRing], queries_empty[kRing];
  CopyBarrier keys_full[kRing], keys_empty[kRing];
  CopyBarrier values_full[kRing], values_empty[kRing];

  __device__ void init() {
    for (u32 i = 0; i < kRing; ++i) {
      queries_full[i].init(1);
      keys_full[i].init(1);
      values_full[i].init(1);
      queries_empty[i].init(kWarps * kConsumers);  // a warp of a consumer each
      keys_empty[i].init(kWarps * kConsumers);
      values_empty[i].init(kWarps * kConsumers);
    }
    fence_barrier_init();
  }
};

// A place in a ring: the `turn`th use of it.
struct Place {
  u32 turn;
  __device__ u32 slot() const { return turn % kRing; }
  __device__ u32 parity() const { return turn / kRing % 2; }
};

// The `index`th prefill item of the launch.
__device__ inline Tile tile_of(const WorkList& work, u32 index) {
  const WorkItem item = work.tiles[index / kKvHeads];
  const u32 blocks = tile_blocks(item), segments = segment_count(work, blocks), kv_head = index % kKvHeads;
  if (item.partial == kWhole) return {item, kv_head, 0, blocks, segments};
  const u32 begin = item.split * work.segment_blocks;
  return {item, kv_head, begin, min(begin + work.segment_blocks, blocks), segments};
}

// Zeroes a block's keys from `first` on.
__device__ inline void clear_keys(bf16* block, u32 first) {
  for (u32 i = thread_in_group(); i < (kBlockKeys - first) * kPieces; i += kWarpgroup) {
    const u32 key = first + i / kPieces, piece = i % kPieces;
    store_raw(block + key / 8 * kHalves * kAtom + piece / 8 * kAtom + key % 8 * kColumns + piece % 8 * 8,
              make_uint4(0, 0, 0, 0));
  }
}

// The copying warp: of item `first`, then of those of further tickets, which are counted from `begun`. Its lanes fetch
// the pages of a block side by side.
__device__ inline void produce_tiles(PrefillShared& shared, const Step& step, const WorkList& work, u32 first,
                                     u32 begun, u32 tiles, u32* ticket, const TensorMap& query_map,
                                     const TensorMap& page_map) {
  const u32 lane = threadIdx.x % 32;
  const auto copy_block = [&](Place place, bf16* ring, CopyBarrier* full, CopyBarrier* empty, u32 page, u32 head) {
    CopyBarrier& done = full[place.slot()];
    empty[place.slot()].wait(place.parity() ^ 1);
    if (lane == 0) done.arrive_expecting(kBlockKeys * kHeadDim * sizeof(bf16));
    __syncwarp();
    if (lane < kBlockPages) {
      bf16* target = ring + place.slot() * kBlockKeys * kHeadDim + lane * kPageHead;
      copy_box(target, page_map, done, 0, 0, 0, (page * 2 * kKvHeads + head) * (kPageSize / 8));
    }
  };

  Place queries = {0}, block = {0};
  for (u32 item = first; item < tiles; ++queries.turn) {
    u32 next = 0;
    if (lane == 0) next = begun + atomicAdd(ticket, 1u);
    const Tile tile = tile_of(work, item);
    const u32 slot = queries.slot();
    shared.queries_empty[slot].wait(queries.parity() ^ 1);
    if (lane == 0) {
      shared.tile[slot] = tile;
      shared.queries_full[slot].arrive_expecting(kTileTokens * kGroup * kHeadDim * sizeof(bf16));
      for (u32 half = 0; half < kHalves; ++half) {
        copy_box(shared.queries[slot][half], query_map, shared.queries_full[slot], half * kColumns,
                 tile.kv_head * kGroup, tile.item.token + tile.item.first);
      }
    }
    const i32* page_line = step.page_table + static_cast<u64>(tile.item.line) * step.pages_per_sequence;
    const u32 last_page = (tile.item.kv_length - 1) / kPageSize;  // what a block lacks behind it is masked
    u32 before = 0;
    for (u32 i = tile.begin; i <= tile.end; ++i) {  // keys of a block, then values of the one before: as they are used
      u32 page = 0;
      if (i < tile.end) {
        if (lane < kBlockPages) page = page_line[min(i * kBlockPages + lane, last_page)];
        copy_block(block, shared.keys[0], shared.keys_full, shared.keys_empty, page, tile.kv_head);
      }
      if (i > tile.begin) {
        copy_block({block.turn - 1}, shared.values[0], shared.values_full, shared.values_empty, before,
                   kKvHeads + tile.kv_head);
      }
      before = page;
      ++block.turn;
    }
    --block.turn;
    item = __shfl_sync(0xFFFFFFFFu, next, 0);
  }
  shared.queries_empty[queries.slot()].wait(queries.parity() ^ 1);
  if (lane == 0) {
    shared.tile[queries.slot()].end = 0;
    shared.queries_full[queries.slot()].arrive();
  }
}

}  // namespace blink

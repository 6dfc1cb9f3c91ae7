// What a prefill tile reads, on its way through shared memory: rings of queries, keys and values, and the warp that
// fills them by boxes of tensor maps, a page of a KV head at a time.
//
// Blocks of pages in FP8 go to a ring of their own, and the copying warpgroup's other warps make operands of them. 768
// of the 2,400 cycles that the tensor cores need for a block are what that adds to the traffic of shared memory.
#pragma once

#include "attention_work.cuh"
#include "kv_cache.cuh"
#include "step.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

namespace blink {

inline constexpr u32 kRing = 2;      // tiles of queries, blocks of keys, blocks of values in flight
inline constexpr u32 kColumns = 64;  // of a swizzle atom: 128 bytes
inline constexpr u32 kHalves = kHeadDim / kColumns;
inline constexpr u32 kAtom = 8 * kColumns;  // 8 rows
inline constexpr u32 kBlockPages = kBlockKeys / kPageSize;
inline constexpr u32 kKeyBytes = kHeadDim * sizeof(KvElement);
inline constexpr u32 kPageAtoms = kPageHead * sizeof(KvElement) / (8 * (kKeyBytes < 128 ? 128 : kKeyBytes));
inline constexpr u32 kConsumers = 2, kConsumerRows = 64;
inline constexpr u32 kWideners = kWarps - 1;                // warps that make operands of codes
inline constexpr u32 kFillers = kFp8Cache ? kWideners : 1;  // that say when a block of operands is full
inline constexpr u32 kEqualRegisters = 168;
inline constexpr u32 kProducerRegisters = kFp8Cache ? 56 : 40, kConsumerRegisters = kFp8Cache ? 224 : 232;

static_assert(kConsumers * kConsumerRows == kTileRows, "64 rows of a tile for each consumer");
static_assert(kPageSize <= kBlockKeys, "whole pages fill a block");

struct Tile {
  WorkItem item;
  u32 kv_head;
  u32 begin, end;  // blocks of keys; the end is 0 after the last tile
  u32 segments;    // of the whole tile
};

enum BlockOf : u32 { kKeys, kValues, kNoBlock };  // the last comes after all blocks

// Blocks that are not operands yet, swizzled, as [row][128]: a row has a key or two.
template <class Element>
struct Landed {};
template <>
struct Landed<e4m3> {
  alignas(1024) e4m3 landed[kRing][kBlockKeys * kHeadDim];
};

template <class Element>
struct Landing {
  __device__ void init() {}
};
template <>
struct Landing<e4m3> {
  BlockOf kind[kRing];
  CopyBarrier full[kRing], empty[kRing];

  __device__ void init() {
    for (u32 i = 0; i < kRing; ++i) {
      full[i].init(1);
      empty[i].init(kWideners);
    }
  }
};

struct PrefillShared : Landed<KvElement> {
  // Queries are [half][row][kColumns], keys and values [8 keys][half][key % 8][kColumns]: pages follow each other.
  alignas(1024) Operand queries[kRing][kHalves][kTileRows * kColumns];
  alignas(1024) Operand keys[kRing][kBlockKeys * kHeadDim];
  alignas(1024) Operand values[kRing][kBlockKeys * kHeadDim];
  Tile tile[kRing];
  u32 last[kConsumers];
  CopyBarrier queries_full[kRing], queries_empty[kRing];
  CopyBarrier keys_full[kRing], keys_empty[kRing];
  CopyBarrier values_full[kRing], values_empty[kRing];
  Landing<KvElement> landing;

  __device__ void init() {
    for (u32 i = 0; i < kRing; ++i) {
      queries_full[i].init(1);
      keys_full[i].init(kFillers);
      values_full[i].init(kFillers);
      queries_empty[i].init(kWarps * kConsumers);  // a warp of a consumer each
      keys_empty[i].init(kWarps * kConsumers);
      values_empty[i].init(kWarps * kConsumers);
    }
    landing.init();
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
__device__ inline void clear_keys(Operand* block, u32 first) {
  for (u32 i = thread_in_group(); i < (kBlockKeys - first) * kPieces; i += kWarpgroup) {
    const u32 key = first + i / kPieces, piece = i % kPieces;
    store_raw(block + key / 8 * kHalves * kAtom + piece / 8 * kAtom + key % 8 * kColumns + piece % 8 * 8,
              make_uint4(0, 0, 0, 0));
  }
}

// Fetches a block's pages, one each lane. `place` is its turn among its kind, `landing` among all.
template <class Shared>
__device__ inline void copy_block(Shared& shared, BlockOf kind, Place place, Place landing, u32 page, u32 kv_head,
                                  const TensorMap& page_map) {
  const u32 lane = threadIdx.x % 32, head = kind == kKeys ? kv_head : kKvHeads + kv_head;
  const auto copy = [&](KvElement* block, CopyBarrier& done) {
    if (lane == 0) done.arrive_expecting(kBlockKeys * kKeyBytes);
    __syncwarp();
    if (lane < kBlockPages) {
      copy_box(block + lane * kPageHead, page_map, done, 0, 0, 0, (page * 2 * kKvHeads + head) * kPageAtoms);
    }
  };
  if constexpr (kFp8Cache) {
    const u32 slot = landing.slot();
    shared.landing.empty[slot].wait(landing.parity() ^ 1);
    if (lane == 0) shared.landing.kind[slot] = kind;
    copy(shared.landed[slot], shared.landing.full[slot]);
  } else {
    const u32 slot = place.slot();
    (kind == kKeys ? shared.keys_empty : shared.values_empty)[slot].wait(place.parity() ^ 1);
    Operand* ring = kind == kKeys ? shared.keys[0] : shared.values[0];
    copy(ring + slot * kBlockKeys * kHeadDim, (kind == kKeys ? shared.keys_full : shared.values_full)[slot]);
  }
}

// After the last block.
template <class Shared>
__device__ inline void end_blocks(Shared& shared, Place landing) {
  if constexpr (kFp8Cache) {
    shared.landing.empty[landing.slot()].wait(landing.parity() ^ 1);
    if (threadIdx.x % 32 > 0) return;
    shared.landing.kind[landing.slot()] = kNoBlock;
    shared.landing.full[landing.slot()].arrive();
  }
}

// The other warps of the copying one's warpgroup: blocks of codes into blocks of operands, in the order in which they
// land. Eight lanes whose accesses go together have the same piece of eight rows, in different banks by the swizzle.
template <class Shared>
__device__ inline void widen_blocks(Shared& shared) {
  const u32 lane = threadIdx.x % 32;
  const auto widen_block = [&](const e4m3* codes, Operand* operands) {
    constexpr u32 kPieces = kBlockKeys * kHeadDim / (32 * 16), kAtOnce = kPieces / 8;  // of a lane
    for (u32 first = (warp_in_group() - 1) * kAtOnce; first < kPieces; first += kWideners * kAtOnce) {
      const auto row_of = [&](u32 i) { return (first + i) / 2 * 8 + lane % 8; };
      const auto piece_of = [&](u32 i) { return (first + i) % 2 * 4 + lane / 8; };
      uint4 raw[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        raw[i] = *reinterpret_cast<const uint4*>(codes + row_of(i) * 128 + (piece_of(i) ^ lane % 8) * 16);
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        uint4 wide[kPacked];
        widen(raw[i], wide);
        const u32 element = row_of(i) * 128 + piece_of(i) * 16;
        const u32 key = element / kHeadDim, dimension = element % kHeadDim;
        Operand* target = operands + key / 8 * kHalves * kAtom + dimension / kColumns * kAtom + key % 8 * kColumns;
#pragma unroll
        for (u32 k = 0; k < kPacked; ++k) {
          store_raw(target + ((dimension % kColumns / 8 + k) ^ key % 8) * 8, wide[k]);
        }
      }
    }
  };
  if constexpr (kFp8Cache) {
    Place keys = {0}, values = {0};
    for (Place landing = {0};; ++landing.turn) {
      const u32 from = landing.slot();
      shared.landing.full[from].wait(landing.parity());
      const BlockOf kind = shared.landing.kind[from];
      if (kind == kNoBlock) return;
      const Place place = kind == kKeys ? keys : values;
      const u32 to = place.slot();
      (kind == kKeys ? shared.keys_empty : shared.values_empty)[to].wait(place.parity() ^ 1);
      widen_block(shared.landed[from], (kind == kKeys ? shared.keys : shared.values)[to]);
      fence_async_proxy();  // the tensor cores read next what this warp has written
      __syncwarp();
      if (lane == 0) {
        shared.landing.empty[from].arrive();
        (kind == kKeys ? shared.keys_full : shared.values_full)[to].arrive();
      }
      ++(kind == kKeys ? keys : values).turn;
    }
  }
}

// The copying warp: of item `first`, then of those of further tickets, which are counted from `begun`. Its lanes fetch
// the pages of a block side by side.
__device__ inline void produce_tiles(PrefillShared& shared, const Step& step, const WorkList& work, u32 first,
                                     u32 begun, u32 tiles, u32* ticket, const TensorMap& query_map,
                                     const TensorMap& page_map) {
  const u32 lane = threadIdx.x % 32;
  Place queries = {0}, block = {0}, landing = {0};
  for (u32 item = first; item < tiles; ++queries.turn) {
    u32 next = 0;
    if (lane == 0) next = begun + atomicAdd(ticket, 1u);
    const Tile tile = tile_of(work, item);
    const u32 slot = queries.slot();
    shared.queries_empty[slot].wait(queries.parity() ^ 1);
    if (lane == 0) {
      shared.tile[slot] = tile;
      shared.queries_full[slot].arrive_expecting(kTileTokens * kGroup * kHeadDim * sizeof(Operand));
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
        copy_block(shared, kKeys, block, landing, page, tile.kv_head, page_map);
        ++landing.turn;
      }
      if (i > tile.begin) {
        copy_block(shared, kValues, {block.turn - 1}, landing, before, tile.kv_head, page_map);
        ++landing.turn;
      }
      before = page;
      ++block.turn;
    }
    --block.turn;
    item = __shfl_sync(0xFFFFFFFFu, next, 0);
  }
  end_blocks(shared, landing);
  shared.queries_empty[queries.slot()].wait(queries.parity() ^ 1);
  if (lane == 0) {
    shared.tile[queries.slot()].end = 0;
    shared.queries_full[queries.slot()].arrive();
  }
}

}  // namespace blink

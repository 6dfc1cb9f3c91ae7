// Builds the step's attention work list and the token -> row map on the device.
//
// One block; scans over the rows place their splits and slots. A row of one split writes it itself, for others a warp
// does. Prefill items come longest first: they are counted by class of length, then written class by class, within a
// class in any order; no result depends on it. Runs once a step; bound by latency (a few microseconds).
#include "attention_work.cuh"
#include "dependent_launch.cuh"
#include "step.cuh"

namespace blink {

inline constexpr u32 kPlanThreads = 512;

// Sum of `value` over lower threads; `total` gets the sum over all.
__device__ inline u64 block_exclusive(u64 value, u64* scratch, u64& total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 inclusive = value;
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u64 lower = __shfl_up_sync(0xFFFFFFFFu, inclusive, distance);
    if (lane >= distance) inclusive += lower;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  u64 before = 0;
  total = 0;
  for (u32 w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  __syncthreads();
  return before + inclusive - value;
}

inline constexpr u32 kClasses = 128;  // of up to 2^18 blocks of keys

// Grows with the blocks of keys: one class each up to 16, then eight for each power of two.
__device__ inline u32 class_of(u32 blocks) {
  const i32 shift = 28 - __clz(blocks);
  return shift <= 0 ? blocks : shift * 8 + (blocks >> shift);
}

struct PlanShared {
  u64 scan[kPlanThreads / 32];
  WorkItem item[kPlanThreads];
  bool alone[kPlanThreads];  // the row has nothing for a warp to do
  u32 classes[kClasses];     // items of each class; then where its next one goes
};

__device__ inline WorkItem item_of(const Step& step, u32 row) {
  const u32 start = step.row_start[row];
  return {row,
          static_cast<u32>(step.sequence[row]),
          start,
          step.row_start[row + 1] - start,
          static_cast<u32>(step.kv_length[row]),
          0,
          0,
          0};
}

__device__ inline u32 tile_count(const WorkItem& item) { return (item.tokens + kTileTokens - 1) / kTileTokens; }

// Slots that a chunk's tiles would fill: as many for each as the last one has segments. 0 if no tile is divided.
__device__ inline u32 slots_of(const WorkList& work, const WorkItem& item) {
  const u32 segments = segment_count(work, (item.kv_length + kBlockKeys - 1) / kBlockKeys);
  return segments > 1 ? tile_count(item) * segments : 0;
}

// The splits of a decode row, by one warp.
__device__ inline void write_splits(const WorkList& work, WorkItem item) {
  const u32 keys = split_keys(item.kv_length), count = split_count(item.kv_length);
  for (item.split = threadIdx.x % 32; item.split < count; item.split += 32) {
    item.first = item.split * keys;
    work.splits[item.partial + item.split] = item;
  }
}

// Calls place(item, blocks of keys) for every prefill item of a chunk, by one warp. `item.partial` is the chunk's first
// slot; without enough of them its tiles stay whole.
template <typename Place>
__device__ inline void for_each_tile(const WorkList& work, WorkItem item, const Place& place) {
  const u32 first_slot = item.partial, slots = slots_of(work, item), tiles = tile_count(item);
  const bool divided = slots > 0 && first_slot + slots <= work.slots;
  for (u32 t = threadIdx.x % 32; t < tiles; t += 32) {
    item.first = t * kTileTokens;
    const u32 blocks = tile_blocks(item), segments = divided ? segment_count(work, blocks) : 1;
    item.partial = divided ? first_slot + t * (slots / tiles) : kWhole;
    for (item.split = 0; item.split < segments; ++item.split) {
      const u32 begin = item.split * work.segment_blocks;
      place(item, divided ? min(work.segment_blocks, blocks - begin) : blocks);
    }
  }
}

// Runs over the rows. The first time writes the splits and the token -> row map and counts the prefill items; a second
// time writes those. Returns both totals: decode splits, and tokens of prefill chunks.
template <bool kSecond>
__device__ inline uint2 plan_rows(const Step& step, const WorkList& work, i32* token_row, PlanShared& shared) {
  const u32 rows = step.counts->rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u64 base = 0;  // splits, and slots below
  u32 chunks = 0;
  for (u32 start = 0; start < rows; start += kPlanThreads) {
    const u32 mine = start + threadIdx.x;
    u64 wanted = 0;
    WorkItem item = {};
    if (mine < rows) {
      item = item_of(step, mine);
      wanted = item.tokens == 1 ? static_cast<u64>(split_count(item.kv_length)) << 32 : slots_of(work, item);
    }
    u64 total;
    const u64 place = base + block_exclusive(wanted, shared.scan, total);
    base += total;
    item.partial = static_cast<u32>(item.tokens == 1 ? place >> 32 : place);
    const bool alone = item.tokens == 0 || (item.tokens == 1 && (kSecond || wanted == 1ull << 32));
    if (!kSecond && item.tokens == 1 && alone) {
      token_row[item.token] = mine;
      work.splits[item.partial] = item;
    }
    shared.item[threadIdx.x] = item;
    shared.alone[threadIdx.x] = alone;
    chunks += __syncthreads_count(item.tokens > 1);

    for (u32 i = warp; i < kPlanThreads && start + i < rows; i += kPlanThreads / 32) {
      if (shared.alone[i]) continue;
      const WorkItem row = shared.item[i];
      if (kSecond) {
        for_each_tile(work, row, [&](const WorkItem& tile, u32 blocks) {
          work.tiles[atomicAdd(&shared.classes[class_of(blocks)], 1u)] = tile;
        });
        continue;
      }
      for (u32 token = lane; token < row.tokens; token += 32) token_row[row.token + token] = row.row;
      if (row.tokens == 1) {
        write_splits(work, row);
      } else {
        for_each_tile(work, row,
                      [&](const WorkItem&, u32 blocks) { atomicAdd(&shared.classes[class_of(blocks)], 1u); });
      }
    }
    __syncthreads();
  }
  return make_uint2(static_cast<u32>(base >> 32), chunks);
}

extern "C" __global__ void __launch_bounds__(kPlanThreads)
    plan_attention(Step step, WorkList work, i32* token_row, u32 layers) {
  __shared__ PlanShared shared;
  let_successor_begin();
  wait_for_predecessor();
  for (u32 i = threadIdx.x; i < 2 * layers; i += kPlanThreads) work.tickets[i] = 0;
  if (threadIdx.x < kClasses) shared.classes[threadIdx.x] = 0;
  __syncthreads();
  const uint2 found = plan_rows<false>(step, work, token_row, shared);

  u64 items = 0;
  if (found.y > 0) {
    u32* longest = threadIdx.x < kClasses ? &shared.classes[kClasses - 1 - threadIdx.x] : nullptr;
    const u64 before = block_exclusive(longest ? *longest : 0, shared.scan, items);
    if (longest) *longest = static_cast<u32>(before);
    __syncthreads();
    plan_rows<true>(step, work, token_row, shared);
  }
  if (threadIdx.x == 0) {
    work.counts[0] = static_cast<u32>(items);
    work.counts[1] = found.x;
  }
}

}  // namespace blink

// Builds the step's attention work list and the token -> row map on the device.
//
// One block; a scan over the rows places their items. A row of one item writes it itself, for others a warp does. Tiles
// of a row are listed from its end, where they see the most keys. Runs once a step; bound by latency (a few
// microseconds).
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

// All of a row's items, by one warp.
__device__ inline void write_items(const WorkList& work, WorkItem item, u32 first_tile, i32* token_row) {
  const u32 lane = threadIdx.x % 32, row = item.row;
  for (u32 token = lane; token < item.tokens; token += 32) token_row[item.token + token] = row;
  if (item.tokens == 1) {
    const u32 keys = split_keys(item.kv_length), count = split_count(item.kv_length);
    for (item.split = lane; item.split < count; item.split += 32) {
      item.first = item.split * keys;
      work.splits[item.partial + item.split] = item;
    }
  } else {
    const u32 count = (item.tokens + kTileTokens - 1) / kTileTokens;
    for (u32 t = lane; t < count; t += 32) {
      item.first = (count - 1 - t) * kTileTokens;
      work.tiles[first_tile + t] = item;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kPlanThreads)
    plan_attention(Step step, WorkList work, i32* token_row, u32 layers) {
  __shared__ u64 scratch[kPlanThreads / 32];
  __shared__ WorkItem shared_item[kPlanThreads];
  __shared__ u32 shared_tile[kPlanThreads];  // tiles before the row
  __shared__ bool alone[kPlanThreads];
  let_successor_begin();
  wait_for_predecessor();
  const u32 rows = step.counts->rows;
  for (u32 i = threadIdx.x; i < 2 * layers; i += kPlanThreads) work.tickets[i] = 0;

  u64 base = 0;
  for (u32 tile = 0; tile < rows; tile += kPlanThreads) {
    const u32 mine = tile + threadIdx.x;
    u64 items = 0;
    WorkItem item = {};
    if (mine < rows) {
      const u32 start = step.row_start[mine];
      item = {mine,
              static_cast<u32>(step.sequence[mine]),
              start,
              step.row_start[mine + 1] - start,
              static_cast<u32>(step.kv_length[mine]),
              0,
              0,
              0};
      items = item.tokens == 1 ? static_cast<u64>(split_count(item.kv_length)) << 32
                               : (item.tokens + kTileTokens - 1) / kTileTokens;
    }
    u64 total;
    const u64 place = base + block_exclusive(items, scratch, total);
    base += total;
    item.partial = static_cast<u32>(place >> 32);
    if (items == 1ull << 32) {
      token_row[item.token] = mine;
      work.splits[item.partial] = item;
    }
    shared_item[threadIdx.x] = item;
    shared_tile[threadIdx.x] = static_cast<u32>(place);
    alone[threadIdx.x] = items == 0 || items == 1ull << 32;
    __syncthreads();

    for (u32 i = threadIdx.x / 32; i < kPlanThreads && tile + i < rows; i += kPlanThreads / 32) {
      if (!alone[i]) write_items(work, shared_item[i], shared_tile[i], token_row);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    work.counts[0] = static_cast<u32>(base);
    work.counts[1] = static_cast<u32>(base >> 32);
  }
}

}  // namespace blink

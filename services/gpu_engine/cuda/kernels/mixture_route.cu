// Routes a mixture-of-experts layer: router logits, each token's experts and their weights, and the work list.
//
// Grid (16 tokens, 16 experts), eight warps that split the inputs. Operands go from global memory straight into
// tensor-core fragments: a dot product does not care in which order it is summed, so lane c of four takes 8 consecutive
// inputs of every 32 of both. The last block of a token tile to arrive chooses the experts of its tokens, a warp a
// token; the last tile groups all (token, choice) pairs by expert and writes the list. Sums have one order and pairs
// keep theirs, so nothing depends on the batch or on who came first. Runs once a layer; bound by latency at decode.
#include "dependent_launch.cuh"
#include "mixture.cuh"
#include "mma.cuh"
#include "reduce.cuh"
#include "step.cuh"

namespace blink {

inline constexpr u32 kRouteWarps = 8, kRouteThreads = 32 * kRouteWarps;
inline constexpr u32 kRouteTokens = 16, kRouteExperts = 16;
inline constexpr u32 kGroups = kExperts / kRouteExperts;
inline constexpr u32 kSpan = kHidden / kRouteWarps;    // inputs of a warp
inline constexpr u32 kPerLane = (kExperts + 31) / 32;  // experts of a lane
inline constexpr u32 kEveryLane = 0xFFFFFFFFu;

struct RouteShared {
  float partial[kRouteWarps][kRouteExperts][kRouteTokens + 1];
};

// Where the pairs of each warp's span go: first counts, then the next place of each expert.
struct GroupShared {
  u32 next[kRouteWarps][kExperts];
};

// Logits of 16 tokens and 16 experts.
__device__ inline void route_logits(RouteShared& shared, float* logits, const bf16* x, const bf16* router, u32 first,
                                    u32 tokens, u32 first_expert) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 input = warp * kSpan + c * 8;
  const bf16* expert = router + static_cast<u64>(first_expert + g) * kHidden + input;
  const bf16* low = x + static_cast<u64>(min(first + g, tokens - 1)) * kHidden + input;
  const bf16* high = x + static_cast<u64>(min(first + 8 + g, tokens - 1)) * kHidden + input;
  float sum[2][4] = {};
#pragma unroll 4
  for (u32 k = 0; k < kSpan; k += 32) {
    const uint4 a = load_raw(expert + k), b = load_raw(expert + 8 * kHidden + k);
    const uint4 u = load_raw(low + k), v = load_raw(high + k);
    mma(sum[0], a.x, b.x, a.y, b.y, u.x, u.y);
    mma(sum[1], a.x, b.x, a.y, b.y, v.x, v.y);
    mma(sum[0], a.z, b.z, a.w, b.w, u.z, u.w);
    mma(sum[1], a.z, b.z, a.w, b.w, v.z, v.w);
  }
#pragma unroll
  for (u32 tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) shared.partial[warp][g + i / 2 * 8][tile * 8 + 2 * c + i % 2] = sum[tile][i];
  }
  __syncthreads();
  const u32 token = threadIdx.x / kRouteExperts, e = threadIdx.x % kRouteExperts;
  if (first + token >= tokens) return;
  float total = 0.0f;
#pragma unroll
  for (u32 w = 0; w < kRouteWarps; ++w) total += shared.partial[w][e][token];
  __stcg(&logits[static_cast<u64>(first + token) * kExperts + first_expert + e], total);
}

__device__ inline float exponential(float x) { return power_of_two(x * 1.4426950408889634f); }

// One token's experts and weights, by one warp: the largest logits, ties to the lower index.
__device__ inline void choose_experts(const MixtureWork& work, u32 token, bool normalized) {
  const u32 lane = threadIdx.x % 32;
  float value[kPerLane];
#pragma unroll
  for (u32 i = 0; i < kPerLane; ++i) {
    const u32 expert = i * 32 + lane;
    value[i] = expert < kExperts ? __ldcg(&work.logits[static_cast<u64>(token) * kExperts + expert]) : minus_infinity();
  }
  float largest = 0.0f, all = 0.0f, weight = 0.0f;
  u32 mine = 0;  // lane k keeps the k-th expert and its weight
  for (u32 k = 0; k < kChosen; ++k) {
    float best = minus_infinity();
    u32 index = kExperts;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      if (value[i] > best) {
        best = value[i];
        index = i * 32 + lane;
      }
    }
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_xor_sync(kEveryLane, best, distance);
      const u32 other_index = __shfl_xor_sync(kEveryLane, index, distance);
      if (other > best || (other == best && other_index < index)) {
        best = other;
        index = other_index;
      }
    }
    if (k == 0) {
      largest = best;
#pragma unroll
      for (u32 i = 0; i < kPerLane; ++i) all += exponential(value[i] - largest);
      all = warp_sum(all);
    }
    index = min(index, kExperts - 1);  // there is none above -inf when logits are NaN, which no choice can mend
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      if (i * 32 + lane == index) value[i] = minus_infinity();
    }
    if (lane == k) {
      mine = index;
      weight = exponential(best - largest);
    }
  }
  float total = all;
  if (normalized) {
    total = 0.0f;
    for (u32 k = 0; k < kChosen; ++k) total += __shfl_sync(kEveryLane, weight, k);
  }
  if (lane < kChosen) {
    __stcg(&work.chosen[token * kChosen + lane], static_cast<i32>(mine));
    work.weights[token * kChosen + lane] = weight / total;
  }
}

// Exclusive sum over the lanes of a warp; `total` gets the sum over all.
__device__ inline u32 lanes_before(u32 value, u32& total) {
  u32 inclusive = value;
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 lower = __shfl_up_sync(kEveryLane, inclusive, distance);
    if (threadIdx.x % 32 >= distance) inclusive += lower;
  }
  total = __shfl_sync(kEveryLane, inclusive, 31);
  return inclusive - value;
}

// Turns the counts of each warp's pairs into places, and writes the items; by one warp.
__device__ inline void place_experts(GroupShared& shared, const MixtureWork& work, u32 item_rows) {
  const u32 lane = threadIdx.x % 32;
  u32 rows_before = 0, items_before = 0;
  for (u32 base = 0; base < kExperts; base += 32) {
    const u32 expert = base + lane;
    u32 rows = 0;
    if (expert < kExperts) {
#pragma unroll
      for (u32 w = 0; w < kRouteWarps; ++w) rows += shared.next[w][expert];
    }
    const u32 items = (rows + item_rows - 1) / item_rows;
    u32 all_rows, all_items;
    const u32 first = rows_before + lanes_before(rows, all_rows);
    const u32 first_item = items_before + lanes_before(items, all_items);
    rows_before += all_rows;
    items_before += all_items;
    if (expert >= kExperts) continue;
    u32 place = first;
#pragma unroll
    for (u32 w = 0; w < kRouteWarps; ++w) {
      const u32 count = shared.next[w][expert];
      shared.next[w][expert] = place;
      place += count;
    }
    // Items of one expert are of one size, in whole eights, so that the last is not a few rows alone.
    const u32 size = items ? ((rows + items - 1) / items + 7) / 8 * 8 : 0;
    for (u32 i = 0; i < items; ++i) {
      const u32 begin = min(i * size, rows);
      work.items[first_item + i] = {expert, first + begin, min(size, rows - begin), 0};
    }
  }
  if (lane == 0) *work.item_count = items_before;
}

// Groups the pairs by expert, each expert's in the order of the tokens. Warps take consecutive spans of pairs.
__device__ inline void group_pairs(GroupShared& shared, const MixtureWork& work, u32 tokens, u32 item_rows) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 pairs = tokens * kChosen, span = (pairs + kRouteThreads - 1) / kRouteThreads * 32;
  const u32 begin = min(warp * span, pairs), end = min(begin + span, pairs);
  for (u32 expert = lane; expert < kExperts; expert += 32) shared.next[warp][expert] = 0;
  __syncwarp();
  for (u32 pair = begin + lane; pair < end; pair += 32) {
    atomicAdd(&shared.next[warp][__ldcg(&work.chosen[pair])], 1u);
  }
  __syncthreads();
  if (warp == 0) place_experts(shared, work, item_rows);
  __syncthreads();
  for (u32 base = begin; base < end; base += 32) {
    const u32 pair = base + lane;
    const u32 expert = pair < end ? static_cast<u32>(__ldcg(&work.chosen[pair])) : kExperts;
    const u32 same = __match_any_sync(kEveryLane, expert);
    const u32 before = __popc(same & ((1u << lane) - 1));
    u32 place = 0;
    if (pair < end) place = shared.next[warp][expert] + before;
    __syncwarp();
    if (pair < end) {
      if (before == 0) shared.next[warp][expert] += __popc(same);
      work.places[pair] = static_cast<i32>(place);
      work.row_token[place] = static_cast<i32>(pair / kChosen);
    }
    __syncwarp();
  }
}

// True in the block that is the last of `count` to come here; what the others wrote before is then visible to it.
__device__ inline bool arrived_last(u32* arrivals, u32 count, u32& flag) {
  if (count == 1) {
    __syncthreads();
    return true;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    flag = atomicAdd(arrivals, 1u) == count - 1;
    if (flag) *arrivals = 0;
  }
  __syncthreads();
  if (flag) __threadfence();
  return flag;
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 2)
    mixture_route(Step step, MixtureWork work, const bf16* x, const bf16* router, u32 normalized, u32 item_rows) {
  __shared__ union {
    RouteShared route;
    GroupShared group;
  } shared;
  __shared__ u32 last;
  const bf16* experts = router + static_cast<u64>(blockIdx.y) * kRouteExperts * kHidden;
  for (u32 i = threadIdx.x * 64; i < kRouteExperts * kHidden; i += kRouteThreads * 64) prefetch(experts + i);
  wait_for_predecessor();
  let_successor_begin();
  const u32 tokens = step.counts->tokens, tiles = (tokens + kRouteTokens - 1) / kRouteTokens;
  if (tokens == 0 && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *work.item_count = 0;
  if (blockIdx.x >= tiles) return;
  const u32 first = blockIdx.x * kRouteTokens;
  route_logits(shared.route, work.logits, x, router, first, tokens, blockIdx.y * kRouteExperts);
  if (!arrived_last(&work.arrivals[1 + blockIdx.x], kGroups, last)) return;
  for (u32 token = first + threadIdx.x / 32; token < min(first + kRouteTokens, tokens); token += kRouteWarps) {
    choose_experts(work, token, normalized);
  }
  if (arrived_last(&work.arrivals[0], tiles, last)) group_pairs(shared.group, work, tokens, item_rows);
}

}  // namespace blink

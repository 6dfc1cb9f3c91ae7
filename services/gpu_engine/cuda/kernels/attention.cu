// Paged attention of a ragged step: prefill tiles and decode splits of one layer in one launch.
//
// A fixed grid of resident blocks of three warpgroups. In a tile one of them copies for the two that compute
// (attention_prefill.cuh); splits are worked on by each warpgroup alone (attention_decode.cuh). First items go by
// number, further ones by ticket. Tiles are bound by the tensor cores and splits by memory: of a step with both, up to
// half of the blocks begin with splits and the others with tiles, and all go on with what is left.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"
#include "dependent_launch.cuh"

namespace blink {

inline constexpr u32 kWarpgroups = 1 + kConsumers;

struct Splitter {  // of a warpgroup
  using Area = DecodeArea<2 * kPacked>;

  Area areas[kWarps];
  DecodeShared shared;
  u32 next[2];  // items taken
};

struct AttentionShared {
  union {
    PrefillShared prefill;
    Splitter splitters[kWarpgroups];
  };
  u32 first_tile;
};

static_assert(sizeof(AttentionShared) <= 227 << 10, "a block has no more");

extern "C" __device__ u32 attention_shared_bytes = sizeof(AttentionShared);

extern "C" __global__ void __launch_bounds__(kWarpgroups* kWarpgroup, 1)
    attention(Step step, WorkList work, u32 layer, const __grid_constant__ TensorMap query_map,
              const __grid_constant__ TensorMap page_map, const bf16* qkv, const KvElement* pages, bf16* out,
              float scale, KvScales kv_scales) {
  extern __shared__ __align__(1024) unsigned char memory[];
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(memory);
  let_successor_begin();
  wait_for_predecessor();
  const AttentionScales scales(scale, kv_scales);
  const u32 warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroup, 0);
  const u32 tiles = work.counts[0] * kKvHeads, splits = work.counts[1] * kKvHeads;
  const u32 wanted = (splits + kWarpgroups - 1) / kWarpgroups;
  const u32 splitters = tiles == 0 ? gridDim.x : min(gridDim.x / 2, wanted), tilers = gridDim.x - splitters;
  u32 *tile_ticket = work.tickets + 2 * layer, *split_ticket = tile_ticket + 1;

  const auto attend_tiles = [&](u32 first) {
    if (first >= tiles) return;
    if (threadIdx.x == 0) shared.prefill.init();
    __syncthreads();
    if (warpgroup == 0) {
      yield_registers<kProducerRegisters>();
      if (threadIdx.x < 32) {
        produce_tiles(shared.prefill, step, work, first, tilers, tiles, tile_ticket, query_map, page_map);
      } else {
        widen_blocks(shared.prefill);
      }
      wait_at(kBlock, kWarpgroups * kWarpgroup);  // asleep, where a grab would spin
      grab_registers<kEqualRegisters>();
    } else {
      grab_registers<kConsumerRegisters>();
      consume_tiles(shared.prefill, work, warpgroup - 1, out, scales);
      yield_registers<kEqualRegisters>();
      wait_at(kBlock, kWarpgroups * kWarpgroup);
    }
  };
  Splitter& mine = shared.splitters[warpgroup];
  const auto area_of = [&](u32 warp) -> Splitter::Area& { return mine.areas[warp]; };
  const auto take = [&](u32 turn) {
    if (thread_in_group() == 0) mine.next[turn] = splitters * kWarpgroups + atomicAdd(split_ticket, 1u);
  };
  const auto attend_splits = [&](u32 first) {
    for (u32 item = first, turn = 0; item < splits; turn ^= 1) {
      take(turn);
      const WorkItem& split = work.splits[item / kKvHeads];
      const u32 kv_head = item % kKvHeads;
      const bf16* query = qkv + static_cast<u64>(split.token) * kQkvWidth + kv_head * kGroup * kHeadDim;
      decode_split(area_of, mine.shared, step, work, split, kv_head, reinterpret_cast<const Operand*>(query), pages,
                   out, scales);
      synchronize_warpgroup();
      item = mine.next[turn];
    }
  };

  const bool splits_first = blockIdx.x < splitters;
  if (splits_first && splits > 0) attend_splits(warpgroup * splitters + blockIdx.x);
  if (tiles > 0) {
    u32 first = blockIdx.x - splitters;
    if (splits_first) {
      fence_async_proxy();  // the copy engine writes next where the splits were
      if (threadIdx.x == 0) shared.first_tile = tilers + atomicAdd(tile_ticket, 1u);
      __syncthreads();
      first = shared.first_tile;
    }
    attend_tiles(first);
  }
  if (!splits_first && splits > 0) {
    take(1);
    synchronize_warpgroup();
    attend_splits(mine.next[1]);
  }
}

}  // namespace blink

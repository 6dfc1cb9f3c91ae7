// Paged attention of a ragged step: prefill tiles and decode splits of one layer in one launch.
//
// A fixed grid of resident blocks of three warpgroups. Tiles come first because they are long: one warpgroup of a block
// copies for the two that compute (attention_prefill.cuh). Then each warpgroup works on splits of its own
// (attention_decode.cuh). Both kinds are taken by ticket; a launch without tiles begins with the splits of its
// warpgroups' own numbers.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"
#include "dependent_launch.cuh"

namespace blink {

inline constexpr u32 kWarpgroups = 1 + kConsumers;

union AttentionShared {
  PrefillShared prefill;
  DecodeShared decode[kWarpgroups];
};

extern "C" __device__ u32 attention_shared_bytes = sizeof(AttentionShared);

extern "C" __global__ void __launch_bounds__(kWarpgroups* kWarpgroup, 1)
    attention(Step step, WorkList work, u32 layer, const __grid_constant__ TensorMap query_map,
              const __grid_constant__ TensorMap page_map, const bf16* qkv, const bf16* pages, bf16* out, float scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(memory);
  let_successor_begin();
  wait_for_predecessor();
  const u32 warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroup, 0);
  const u32 tiles = work.counts[0] * kKvHeads, splits = work.counts[1] * kKvHeads;
  u32 *tile_ticket = work.tickets + 2 * layer, *split_ticket = tile_ticket + 1;

  if (blockIdx.x < tiles) {
    if (threadIdx.x == 0) shared.prefill.init();
    __syncthreads();
    if (warpgroup == 0) {
      yield_registers<kProducerRegisters>();
      if (threadIdx.x < 32) produce_tiles(shared.prefill, step, work, tiles, tile_ticket, query_map, page_map);
      wait_at(kBlock, kWarpgroups * kWarpgroup);  // asleep, where a grab would spin
      grab_registers<kEqualRegisters>();
    } else {
      grab_registers<kConsumerRegisters>();
      consume_tiles(shared.prefill, warpgroup - 1, out, scale);
      yield_registers<kEqualRegisters>();
      wait_at(kBlock, kWarpgroups * kWarpgroup);
    }
  }

  DecodeShared& mine = shared.decode[warpgroup];
  const u32 begun = tiles == 0 ? gridDim.x * kWarpgroups : 0;
  const auto take = [&](u32 turn) {
    if (thread_in_group() == 0) mine.next[turn] = begun + atomicAdd(split_ticket, 1u);
  };
  u32 item = warpgroup * gridDim.x + blockIdx.x, turn = 0;
  if (tiles > 0) {
    take(1);
    synchronize_warpgroup();
    item = mine.next[1];
  }
  for (; item < splits; turn ^= 1) {
    take(turn);
    decode_split(mine, step, work, work.splits[item / kKvHeads], item % kKvHeads, qkv, pages, out, scale);
    synchronize_warpgroup();
    item = mine.next[turn];
  }
}

}  // namespace blink

// Paged attention of a ragged step: prefill tiles and decode splits of one layer in one launch.
//
// A fixed grid of resident blocks; each begins with the item of its own number and takes further ones by ticket, tiles
// first because they are long. attention_prefill.cuh and attention_decode.cuh hold the two kinds of work.
#include "attention_prefill.cuh"
#include "dependent_launch.cuh"

namespace blink {

inline constexpr u32 kAttentionShared = sizeof(PrefillShared) > sizeof(DecodeShared) ? sizeof(PrefillShared)
                                                                                     : sizeof(DecodeShared);

#ifndef BLINK_ATTENTION_BLOCKS
#define BLINK_ATTENTION_BLOCKS 3
#endif
inline constexpr u32 kBlocksPerMultiprocessor = BLINK_ATTENTION_BLOCKS;

extern "C" __device__ u32 attention_shared_bytes = kAttentionShared;

extern "C" __global__ void __launch_bounds__(kWarps * 32, kBlocksPerMultiprocessor)
    attention(Step step, WorkList work, u32 layer, const bf16* qkv, const bf16* pages, bf16* out, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ DecodeSums sums;
  __shared__ u32 next[2];
  let_successor_begin();
  wait_for_predecessor();
  const u32 tiles = work.counts[0] * kKvHeads, items = tiles + work.counts[1] * kKvHeads;
  u32 turn = 0;
  for (u32 item = blockIdx.x; item < items; turn ^= 1) {
    if (threadIdx.x == 0) next[turn] = gridDim.x + atomicAdd(&work.tickets[layer], 1u);
    const u32 kv_head = item % kKvHeads;
    if (item < tiles) {
      prefill_tile(*reinterpret_cast<PrefillShared*>(memory), step, work.tiles[item / kKvHeads], kv_head, qkv, pages,
                   out, scale);
    } else {
      decode_split(*reinterpret_cast<DecodeShared*>(memory), sums, step, work, work.splits[(item - tiles) / kKvHeads],
                   kv_head, qkv, pages, out, scale);
    }
    __syncthreads();
    item = next[turn];
  }
}

}  // namespace blink

// Segments of a tile's keys: each is summed from nothing, and the sums are added in the order of the keys.
//
// A tile that sees one segment never comes here. Of any other each segment's sums go through global memory, whether one
// block computes them all or several share them, so that the result has the same bits. A consumer's thread keeps
// and reads back its own registers' worth, in 16-byte pieces that lie side by side with its neighbours'. 32 KiB out and
// back for 4,096 keys or more, which take a block 50 us.
#pragma once

#include "attention_softmax.cuh"

namespace blink {

// The segments of a tile, as a consumer sees them.
struct Segments {
  static constexpr u32 kQuads = kHeadDim / 8;  // of the sums of a thread

  const WorkList& work;
  const Tile& tile;
  u32 consumer;

  // Which of all (segment, KV head, consumer) it is.
  __device__ u64 index(u32 segment) const {
    const bool whole = tile.item.partial == kWhole;
    const u64 place = whole ? static_cast<u64>(work.slots) * kKvHeads + blockIdx.x * work.segments + segment
                            : static_cast<u64>(tile.item.partial + segment) * kKvHeads + tile.kv_head;
    return place * kConsumers + consumer;
  }

  __device__ float4* piece(u64 segment) const {
    return work.segment_out + segment * kQuads * kWarpgroup + thread_in_group();
  }

  __device__ float4* extent(u64 segment) const { return work.segment_ml + segment * kWarpgroup + thread_in_group(); }

  __device__ void keep(u32 segment, const float (&sums)[kHeadDim / 2], const float (&maximum)[2],
                       const float (&sum)[2]) const {
    float4* target = piece(index(segment));
#pragma unroll
    for (u32 i = 0; i < kQuads; ++i) {
      __stcg(target + i * kWarpgroup, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
    __stcg(extent(index(segment)), make_float4(maximum[0], sum[0], maximum[1], sum[1]));
  }

  // Whether this warpgroup has kept the tile's last missing segment; `last` is a word that it shares.
  __device__ bool all_there(u32& last) const {
    if (tile.item.partial == kWhole) return true;  // threads read back what they have written themselves
    __threadfence();
    synchronize_warpgroup();
    if (thread_in_group() == 0) {
      u32* arrivals = work.segment_arrivals + (tile.item.partial * kKvHeads + tile.kv_head) * kConsumers + consumer;
      last = atomicAdd(arrivals, 1u) == tile.segments - 1;
      if (last) *arrivals = 0;
    }
    synchronize_warpgroup();
    __threadfence();
    return last;
  }

  __device__ void add(float (&sums)[kHeadDim / 2], float (&sum)[2], float scale) const {
    float maximum[2] = {kNothing, kNothing};
    for (u32 s = 0; s < tile.segments; ++s) {
      const float4 ml = __ldcg(extent(index(s)));
      maximum[0] = fmaxf(maximum[0], ml.x);
      maximum[1] = fmaxf(maximum[1], ml.z);
    }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kHeadDim / 2; ++i) sums[i] = 0.0f;
    for (u32 s = 0; s < tile.segments; ++s) {
      const float4 ml = __ldcg(extent(index(s)));
      const float rescale[2] = {power_of_two((ml.x - maximum[0]) * scale), power_of_two((ml.z - maximum[1]) * scale)};
      sum[0] = fmaf(ml.y, rescale[0], sum[0]);
      sum[1] = fmaf(ml.w, rescale[1], sum[1]);
      const float4* source = piece(index(s));
#pragma unroll
      for (u32 i = 0; i < kQuads; ++i) {
        const float4 part = __ldcg(source + i * kWarpgroup);
        sums[4 * i] = fmaf(part.x, rescale[0], sums[4 * i]);
        sums[4 * i + 1] = fmaf(part.y, rescale[0], sums[4 * i + 1]);
        sums[4 * i + 2] = fmaf(part.z, rescale[1], sums[4 * i + 2]);
        sums[4 * i + 3] = fmaf(part.w, rescale[1], sums[4 * i + 3]);
      }
    }
  }
};

}  // namespace blink

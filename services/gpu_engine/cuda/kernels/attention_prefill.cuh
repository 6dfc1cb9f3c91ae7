// Causal attention of tiles of a prompt chunk's queries over all the keys before them (sm_90a).
//
// A tile is kTileRows (token, query head of the group) pairs, so that the heads that share keys share their loads, and
// short chunks fill it sooner. Warpgroup 0 copies: tiles of queries and blocks of 128 keys and values into rings in
// shared memory, by boxes of tensor maps, a page of a KV head at a time. Warpgroups 1 and 2 have 64 rows of each tile:
// scores from shared memory, weights from registers times values (wgmma), online softmax in base 2. While one issues
// its products the other has the softmax, and a block's products with values run under the next one's softmax (the
// schedule of FlashAttention-3, arXiv 2407.08608).
//
// Blocks and segments begin at fixed multiples of keys from the sequence's start, and what a row does not see changes
// nothing in it, so a row's bits depend neither on the chunk nor on the batch. Bound by the tensor cores.
#pragma once

#include "attention_segments.cuh"
#include "wgmma.cuh"

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "attention needs a Hopper GPU (sm_90a)"
#endif

namespace blink {

// One of the two computing warpgroups.
__device__ inline void consume_tiles(PrefillShared& shared, const WorkList& work, u32 consumer, bf16* out,
                                     const AttentionScales& scales) {
  const u32 lane = threadIdx.x % 32, warp = warp_in_group();
  const auto release = [&](CopyBarrier& empty) {
    __syncwarp();
    if (lane == 0) empty.arrive();
  };
  Softmax softmax;
  float sums[kHeadDim / 2];

  const auto multiply_keys = [&](const Operand* queries, const Operand* keys) {
    const u32 rows = shared_address(queries) + consumer * kConsumerRows * kColumns * sizeof(Operand);
#pragma unroll
    for (u32 d = 0; d < kHeadDim / 16; ++d) {
      const u32 half = d / 4, bytes = d % 4 * 32;
      multiply<Operand>(
          softmax.scores, operand(rows + half * kTileRows * kColumns * sizeof(Operand) + bytes, 8 * 128),
          operand(shared_address(keys) + half * kAtom * sizeof(Operand) + bytes, kHalves * kAtom * sizeof(Operand)),
          d > 0);
    }
    commit_products();
  };
  const auto multiply_values = [&](const Operand* values) {
    constexpr u32 kGroupBytes = kHalves * kAtom * sizeof(Operand);  // 8 keys
#pragma unroll
    for (u32 i = 0; i < kBlockKeys / 16; ++i) {
      multiply<Operand>(sums, softmax.weights[i],
                        operand(shared_address(values) + i * 2 * kGroupBytes, kGroupBytes, kAtom * sizeof(Operand)));
    }
    commit_products();
  };

  Place queries = {0}, block = {0};
  const auto await_keys = [&](bool more) {  // of the block after this
    const Place next = {block.turn + 1};
    if (more) shared.keys_full[next.slot()].wait(next.parity());
  };
  if (consumer == 1) arrive_at(kTurn, kConsumers * kWarpgroup);  // consumer 0 issues first
  for (;; ++queries.turn) {
    shared.queries_full[queries.slot()].wait(queries.parity());
    const Tile tile = shared.tile[queries.slot()];
    if (tile.end == 0) break;
    const Operand* rows = shared.queries[queries.slot()][0];
    const u32 computed = tile.item.kv_length - tile.item.tokens;
    const u32 unmasked = (computed + tile.item.first + 1) / kBlockKeys;  // blocks that all of the tile sees in full
    bf16* target[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 row = consumer * kConsumerRows + warp * 16 + r * 8 + lane / 4;
      const u32 token = tile.item.first + row / kGroup, head = tile.kv_head * kGroup + row % kGroup;
      const bool valid = row < kTileTokens * kGroup && token < tile.item.tokens;
      softmax.position[r] = computed + token;
      target[r] = valid ? out + static_cast<u64>(tile.item.token + token) * kQueryWidth + head * kHeadDim : nullptr;
    }
    const Segments segments = {work, tile, consumer};
    for (u32 begin = tile.begin; begin < tile.end; begin += work.segment_blocks) {
      const u32 end = min(begin + work.segment_blocks, tile.end);
      softmax.reset();
#pragma unroll
      for (u32 i = 0; i < kHeadDim / 2; ++i) sums[i] = 0.0f;

      shared.keys_full[block.slot()].wait(block.parity());
      begin_products();
      multiply_keys(rows, shared.keys[block.slot()]);
      wait_products<0>(softmax.scores);
      release(shared.keys_empty[block.slot()]);
      if (begin >= unmasked) softmax.mask(begin * kBlockKeys);
      softmax.exponentiate(scales.score);
      softmax.round_weights();
      await_keys(begin + 1 < end);

      for (u32 i = begin + 1; i < end; ++i) {
        const Place before = block;
        ++block.turn;
        wait_at(kTurn + consumer, kConsumers * kWarpgroup);
        begin_products();
        multiply_keys(rows, shared.keys[block.slot()]);
        shared.values_full[before.slot()].wait(before.parity());
        multiply_values(shared.values[before.slot()]);
        arrive_at(kTurn + (consumer ^ 1), kConsumers * kWarpgroup);
        wait_products<1>(softmax.scores);
        release(shared.keys_empty[block.slot()]);
        if (i >= unmasked) softmax.mask(i * kBlockKeys);
        softmax.exponentiate(scales.score);
        settle(softmax.scores);
        // Waiting for keys here parts the softmax from the wait for the products that run under it: ptxas moves the
        // latter up to the former's start if they are in one basic block.
        await_keys(i + 1 < end);
        wait_products<0>(sums);
        release(shared.values_empty[before.slot()]);
        softmax.round_weights();
#pragma unroll
        for (u32 k = 0; k < kHeadDim / 2; ++k) sums[k] *= softmax.rescale[k / 2 % 2];
      }
      if (end == tile.end) release(shared.queries_empty[queries.slot()]);

      shared.values_full[block.slot()].wait(block.parity());
      Operand* values = shared.values[block.slot()];
      const u32 valid = tile.item.kv_length - (end - 1) * kBlockKeys;
      if (valid < kBlockKeys) {
        // What lies behind the sequence's end in its last page was never written: 0 x NaN must not reach the sums.
        clear_keys(values, valid);
        fence_async_proxy();
        synchronize_warpgroup();
      }
      begin_products();
      multiply_values(values);
      wait_products<0>(sums);
      release(shared.values_empty[block.slot()]);
      ++block.turn;
      if (tile.segments > 1) segments.keep(begin / work.segment_blocks, sums, softmax.maximum, softmax.sum);
    }
    if (tile.segments > 1) {
      if (!segments.all_there(shared.last[consumer])) continue;
      segments.add(sums, softmax.sum, scales.score);
    }
    store_rows(sums, softmax.sum, target, scales);
  }
  if (consumer == 0)
    wait_at(kTurn, kConsumers * kWarpgroup);  // takes the last turn that was given, so that none is left over
}

}  // namespace blink

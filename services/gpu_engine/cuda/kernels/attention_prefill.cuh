// Causal attention of one tile of a prompt chunk's queries over all the keys before them, for one KV head.
//
// A tile is kTileRows (token, query head of the group) pairs, 16 to each of the four warps, so that the heads that
// share keys share their loads. Blocks of 64 keys and values are copied into shared memory two deep, 16-byte pieces
// swizzled against bank conflicts; online softmax (arXiv 2307.08691). Blocks begin at multiples of 64 keys from the
// sequence's start, so a row's bits depend neither on the chunk nor on the batch. Bound by the tensor cores (mma.sync);
// 195 TFLOP/s at 2,048 tokens on an H200, a quarter of its rate.
#pragma once

#include "attention_decode.cuh"

namespace blink {

inline constexpr u32 kBlockKeys = 64;

struct PrefillShared {
  alignas(128) bf16 keys[2][kBlockKeys * kHeadDim];
  alignas(128) bf16 values[2][kBlockKeys * kHeadDim];
};

__device__ inline u32 swizzled(u32 key, u32 piece) { return (key * kPieces + (piece ^ (key % 8))) * 16; }

__device__ inline void copy_block(PrefillShared& shared, u32 stage, const bf16* pages, const i32* page_line,
                                  u32 kv_head, u32 first, u32 kv_length) {
  const u32 keys = shared_address(shared.keys[stage]), values = shared_address(shared.values[stage]);
#pragma unroll 2
  for (u32 i = threadIdx.x; i < kBlockKeys * kPieces; i += kWarps * 32) {
    const u32 key = i / kPieces, piece = i % kPieces, position = first + key;
    const bool valid = position < kv_length;
    const u32 page = page_line[(valid ? position : first) / kPageSize];
    const bf16* source = pages + page_offset(page, kv_head) + position % kPageSize * kHeadDim + piece * 8;
    copy_async(keys + swizzled(key, piece), source, valid);
    copy_async(values + swizzled(key, piece), source + kPageValues, valid);
  }
}

__device__ inline void prefill_tile(PrefillShared& shared, const Step& step, const WorkItem& item, u32 kv_head,
                                    const bf16* qkv, const bf16* pages, bf16* out, float scale) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 matrix = lane / 8, matrix_row = lane % 8;
  const u32 start = item.token, tokens = item.tokens, kv_length = item.kv_length, computed = kv_length - tokens;
  const i32* page_line = step.page_table + static_cast<u64>(item.line) * step.pages_per_sequence;

  // This lane's two tile rows, g and g + 8 of the warp's 16: their token in the row, query head, last visible key.
  u32 token[2], head[2], position[2];
  bool valid[2];
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u32 tile_row = warp * 16 + r * 8 + g;
    token[r] = item.first + tile_row / kGroup;
    head[r] = kv_head * kGroup + tile_row % kGroup;
    valid[r] = tile_row < kTileTokens * kGroup && token[r] < tokens;
    position[r] = computed + (valid[r] ? token[r] : item.first);
  }

  u32 q[kHeadDim / 16][4];
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const bf16* source = qkv + static_cast<u64>(start + token[r]) * kQkvWidth + head[r] * kHeadDim + 2 * c;
#pragma unroll
    for (u32 s = 0; s < kHeadDim / 16; ++s) {
      q[s][r] = valid[r] ? *reinterpret_cast<const u32*>(source + s * 16) : 0;
      q[s][r + 2] = valid[r] ? *reinterpret_cast<const u32*>(source + s * 16 + 8) : 0;
    }
  }
  float o[kHeadDim / 8][4] = {};
  float maximum[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};

  const u32 last_token = min(item.first + kTileTokens, tokens) - 1;
  const u32 blocks = (computed + last_token) / kBlockKeys + 1;
  const u32 unmasked = (computed + item.first + 1) / kBlockKeys;  // blocks that every query of the tile sees in full
  copy_block(shared, 0, pages, page_line, kv_head, 0, kv_length);
  commit_copies();
  for (u32 block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) {
      copy_block(shared, (block + 1) % 2, pages, page_line, kv_head, (block + 1) * kBlockKeys, kv_length);
    }
    commit_copies();
    wait_copies<1>();
    __syncthreads();

    const u32 keys = shared_address(shared.keys[block % 2]), values = shared_address(shared.values[block % 2]);
    float s[kBlockKeys / 8][4] = {};
#pragma unroll
    for (u32 d = 0; d < kHeadDim / 16; ++d) {
#pragma unroll
      for (u32 n = 0; n < kBlockKeys / 16; ++n) {
        u32 b[4];
        load_matrices(b, keys + swizzled(n * 16 + matrix / 2 * 8 + matrix_row, d * 2 + matrix % 2));
        mma(s[2 * n], q[d][0], q[d][1], q[d][2], q[d][3], b[0], b[1]);
        mma(s[2 * n + 1], q[d][0], q[d][1], q[d][2], q[d][3], b[2], b[3]);
      }
    }

    if (block >= unmasked) {
#pragma unroll
      for (u32 n = 0; n < kBlockKeys / 8; ++n) {
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
          if (block * kBlockKeys + n * 8 + 2 * c + k % 2 > position[k / 2]) s[n][k] = minus_infinity();
        }
      }
    }
    float rescale[2], base[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      float top = maximum[r];
#pragma unroll
      for (u32 n = 0; n < kBlockKeys / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
      rescale[r] = power_of_two((maximum[r] - top) * scale);
      maximum[r] = top;
      base[r] = top * scale;
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (u32 n = 0; n < kBlockKeys / 8; ++n) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        s[n][k] = power_of_two(fmaf(s[n][k], scale, -base[k / 2]));
        sum[k / 2] += s[n][k];
      }
    }
#pragma unroll
    for (u32 d = 0; d < kHeadDim / 8; ++d) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) o[d][k] *= rescale[k / 2];
    }
#pragma unroll
    for (u32 n = 0; n < kBlockKeys / 16; ++n) {
      const u32 a0 = pack(s[2 * n][0], s[2 * n][1]), a1 = pack(s[2 * n][2], s[2 * n][3]);
      const u32 a2 = pack(s[2 * n + 1][0], s[2 * n + 1][1]), a3 = pack(s[2 * n + 1][2], s[2 * n + 1][3]);
#pragma unroll
      for (u32 d = 0; d < kHeadDim / 16; ++d) {
        u32 b[4];
        load_matrices_transposed(b, values + swizzled(n * 16 + matrix % 2 * 8 + matrix_row, d * 2 + matrix / 2));
        mma(o[2 * d], a0, a1, a2, a3, b[0], b[1]);
        mma(o[2 * d + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
    __syncthreads();
  }
  wait_copies<0>();

#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
    if (!valid[r]) continue;
    const float inverse = 1.0f / sum[r];
    bf16* target = out + static_cast<u64>(start + token[r]) * kQueryWidth + head[r] * kHeadDim + 2 * c;
#pragma unroll
    for (u32 d = 0; d < kHeadDim / 8; ++d) {
      *reinterpret_cast<u32*>(target + d * 8) = pack(o[d][2 * r] * inverse, o[d][2 * r + 1] * inverse);
    }
  }
}

}  // namespace blink

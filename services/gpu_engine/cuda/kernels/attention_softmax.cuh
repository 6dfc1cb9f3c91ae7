// Online softmax (arXiv 2307.08691) of a block of scores in the registers of a warpgroup, laid out as wgmma leaves
// them: a quad of lanes shares two rows. Base 2, fp32, weights rounded to operands of the product with values.
#pragma once

#include "attention_ring.cuh"
#include "mma.cuh"

namespace blink {

// A maximum below all scores. Finite, so that a row which sees no key of a segment has weights of 0 there, not NaN.
inline constexpr float kNothing = -1e30f;

// A consumer's rows of a tile: scores and weights of a block, running maximum and sum of a thread's two rows.
struct Softmax {
  float scores[kBlockKeys / 2];
  u32 weights[kBlockKeys / 16][4];  // as operands
  float maximum[2], sum[2], rescale[2];
  u32 position[2];  // of the rows' tokens

  __device__ void reset() {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      maximum[r] = kNothing;
      sum[r] = 0.0f;
    }
  }

  __device__ void mask(u32 first_key) {
    const u32 c = threadIdx.x % 4;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const i32 last = static_cast<i32>(position[r]) - static_cast<i32>(first_key + 2 * c);
#pragma unroll
      for (u32 n = 0; n < kBlockKeys / 8; ++n) {
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
          if (static_cast<i32>(n * 8 + k) > last) scores[4 * n + 2 * r + k] = minus_infinity();
        }
      }
    }
  }

  // Scores become exponentials; `rescale` is what older sums are multiplied with.
  __device__ void exponentiate(float scale) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      float top = maximum[r];
#pragma unroll
      for (u32 n = 0; n < kBlockKeys / 8; ++n) {
        top = fmaxf(top, fmaxf(scores[4 * n + 2 * r], scores[4 * n + 2 * r + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
      rescale[r] = power_of_two((maximum[r] - top) * scale);
      maximum[r] = top;
      const float base = top * scale - kWeightExponent;
      float added = 0.0f;
#pragma unroll
      for (u32 n = 0; n < kBlockKeys / 8; ++n) {
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
          float& score = scores[4 * n + 2 * r + k];
          score = power_of_two(fmaf(score, scale, -base));
          added += score;
        }
      }
      sum[r] = fmaf(sum[r], rescale[r], added);
    }
  }

  __device__ void round_weights() {
#pragma unroll
    for (u32 i = 0; i < kBlockKeys / 16; ++i) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) weights[i][k] = pack_operands(scores[8 * i + 2 * k], scores[8 * i + 2 * k + 1]);
    }
  }
};

// Writes the thread's two rows. Lanes of a quad exchange words, so that each stores 16 bytes.
__device__ inline void store_rows(const float (&out)[kHeadDim / 2], const float (&sum)[2], bf16* const (&target)[2],
                                  const AttentionScales& scales) {
  const u32 c = threadIdx.x % 4;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    float total = sum[r] + __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    const float inverse = 1.0f / scales.divisor(total);
#pragma unroll
    for (u32 n = 0; n < kHeadDim / 8; n += 4) {
      u32 w[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        w[i] = pack(out[4 * (n + i) + 2 * r] * inverse, out[4 * (n + i) + 2 * r + 1] * inverse);
      }
      // Transpose: word i of lane c goes to word c of lane i.
#pragma unroll
      for (u32 distance = 1; distance < 4; distance *= 2) {
        const bool upper = c & distance;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          if (i & distance) continue;
          const u32 got = __shfl_xor_sync(0xFFFFFFFFu, upper ? w[i] : w[i + distance], distance);
          (upper ? w[i] : w[i + distance]) = got;
        }
      }
      if (target[r]) store_raw(target[r] + (n + c) * 8, make_uint4(w[0], w[1], w[2], w[3]));
    }
  }
}

}  // namespace blink

// What follows the sums of a skinny product. An ending is called by a warp, with the first of its 16 rows of W; sums
// are laid out as wgmma.cuh says.
#pragma once

#include "mma.cuh"
#include "skinny_pipeline.cuh"
#include "swiglu.cuh"

namespace blink {

// Calls store(number of the pair, two outputs as bf16) for eight outputs from `output` on of tokens 8n to 8n + 7; of
// lane 4g + c, `pair` is output g of tokens 2c and 2c + 1.
template <class StorePair>
__device__ inline void store_square(const StorePair& store, const Problem& problem, u32 n, u32 output, u32 pair) {
  const u32 transposed = transpose_square(pair), lane = threadIdx.x % 32, token = 8 * n + lane / 4;
  if (token >= problem.tokens || output >= problem.outputs) return;
  store((static_cast<u64>(token) * problem.outputs + output) / 2 + lane % 4, transposed);
}

struct Pairs {
  bf16* out;

  __device__ void operator()(u64 pair, u32 outputs) const { reinterpret_cast<u32*>(out)[pair] = outputs; }
};

template <class StorePair = Pairs>
struct Store {
  StorePair store;

  __device__ void write(const Sums& sums, const Problem& problem, u32 row) const {
#pragma unroll
    for (u32 n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 i = 4 * n + 2 * half;
        store_square(store, problem, n, row + 8 * half, pack(sums[i], sums[i + 1]));
      }
    }
  }
};

struct Logits {
  float* out;

  // One by one: rows of an odd vocabulary are not aligned.
  __device__ void write(const Sums& sums, const Problem& problem, u32 row) const {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < kTokens / 2; ++i) {
      const u32 token = i / 4 * 8 + lane % 4 * 2 + i % 2, output = row + lane / 4 + i % 4 / 2 * 8;
      if (token < problem.tokens && output < problem.outputs) {
        out[static_cast<u64>(token) * problem.outputs + output] = sums[i];
      }
    }
  }
};

struct Swiglu {
  bf16* out;

  __device__ void write(const Sums& sums, const Problem& problem, u32 row) const {
    const auto rounded = [](float value) { return to_float(to_bf16(value)); };
#pragma unroll
    for (u32 n = 0; n < kTokens / 8; ++n) {
      float activated[2];
#pragma unroll
      for (u32 k = 0; k < 2; ++k) activated[k] = gated(rounded(sums[4 * n + k]), rounded(sums[4 * n + 2 + k]));
      store_square(Pairs{out}, problem, n, row / 2, pack(activated[0], activated[1]));
    }
  }
};

}  // namespace blink

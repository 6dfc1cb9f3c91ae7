// A weight matrix in FP8 with its scales, as weights.py lays them out.
#pragma once

#include "float8.cuh"

namespace blink {

inline constexpr u32 kScaleColumns = 128;  // columns that share a row's scale, if its scales are not one for the row

// fp8_products.py fills it.
struct Fp8Matrix {
  const u8* codes;      // [rows, columns]
  const float* scales;  // [blocks of kScaleColumns, rows], or [1, rows]
  u64 block_stride;     // from a block's scales to the next ones: the number of rows, or 0

  __device__ float scale(u32 row, u32 block) const { return scales[block * block_stride + row]; }
};

}  // namespace blink

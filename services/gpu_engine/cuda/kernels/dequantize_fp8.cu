// FP8 weights [rows, columns] as bf16, for products of more tokens than skinny_fp8.cuh takes: each product's weights
// just before it. Bound by memory: 3 bytes a weight.
#include "dependent_launch.cuh"
#include "fp8_matrix.cuh"

namespace blink {

// A thread takes 16 columns, which share a scale; columns is a multiple of 16.
extern "C" __global__ void __launch_bounds__(256) dequantize_fp8(Fp8Matrix matrix, u32 rows, u32 columns, bf16* out) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 column = (blockIdx.x * blockDim.x + threadIdx.x) * 16, row = blockIdx.y;
  if (column >= columns) return;
  const u64 at = static_cast<u64>(row) * columns + column;
  const float scale = matrix.scale(row, column / kScaleColumns);
  const uint4 codes = *reinterpret_cast<const uint4*>(matrix.codes + at);
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  u32 pairs[8];
#pragma unroll
  for (u32 i = 0; i < 8; ++i) pairs[i] = dequantize(static_cast<u16>(words[i / 2] >> i % 2 * 16), scale);
  store_raw(out + at, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  store_raw(out + at + 8, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
}

}  // namespace blink

// FP8 weights as bf16.
#pragma once

#include "float8_instructions.cuh"

namespace blink {

using u8 = unsigned char;

// Two codes times their scale as a pair of bf16: rounded to float, as services/gpu_engine/models/dequantize.py does,
// then to bf16. So a weight has the same bits wherever it is dequantized.
__device__ inline u32 dequantize(u16 codes, float scale) {
  const u32 halves = halves_of_e4m3(codes);
  return pack(float_of_half(static_cast<u16>(halves)) * scale, float_of_half(static_cast<u16>(halves >> 16)) * scale);
}

}  // namespace blink

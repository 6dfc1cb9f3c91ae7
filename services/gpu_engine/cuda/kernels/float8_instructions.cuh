// Conversions of the 8-bit float e4m3 (services/gpu_engine/models/float8.py says what it is) that sm_89 and later have.
#pragma once

#include "f16.cuh"

namespace blink {

// Four codes as four halves, exactly; the first in the low bits.
__device__ inline uint2 halves_of_e4m3(u32 codes) {
  uint2 halves;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(halves.x), "=r"(halves.y)
      : "r"(codes));
  return halves;
}

// Two.
__device__ inline u32 halves_of_e4m3(u16 codes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

// Two floats as codes, rounded to nearest even, at most 448 in magnitude, NaN stays NaN; `low` in the low bits.
__device__ inline u16 e4m3_of(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

}  // namespace blink

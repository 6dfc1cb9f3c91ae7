// Conversions of the 8-bit float e4m3 (services/gpu_engine/models/float8.py says what it is) that sm_89 and later have.
#pragma once

#include "bf16.cuh"

namespace blink {

// Two codes as two halves, exactly; the first in the low bits.
__device__ inline u32 halves_of_e4m3(u16 codes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

__device__ inline float float_of_half(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

}  // namespace blink

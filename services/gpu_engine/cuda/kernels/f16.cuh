// Storage of IEEE half floats, and conversions.
#pragma once

#include "bf16.cuh"

namespace blink {

struct f16 {
  u16 bits;
};

// Two floats rounded to nearest even, at most 65,504 in magnitude, NaN stays NaN; `low` is the first in memory.
__device__ inline u32 pack_f16(float low, float high) {
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline float float_of_half(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

}  // namespace blink

// kernels/f16.cuh in C++.
#pragma once

#include "bf16.cuh"

namespace blink {

struct f16 {
  u16 bits;
};

inline float float_of_half(u16 half) {
  const u32 exponent = half >> 10 & 31, mantissa = half & 1023;
  const float magnitude = exponent == 31  ? mantissa ? NAN : INFINITY
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25);
  return half >> 15 ? -magnitude : magnitude;
}

// To nearest, ties to even; at most 65,504 in magnitude.
inline u16 half_of(float value) {
  const u16 sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7FFF;
  if (magnitude >= 65504) return sign | 0x7BFF;
  const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);  // -14: of subnormals too
  const u32 units = static_cast<u32>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<u16>(((exponent + 14) << 10) + units);  // a carry goes on into the exponent
}

inline u32 pack_f16(float low, float high) { return half_of(low) | static_cast<u32>(half_of(high)) << 16; }

}  // namespace blink

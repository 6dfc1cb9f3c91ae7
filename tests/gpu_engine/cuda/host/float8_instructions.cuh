// The instructions of kernels/float8_instructions.cuh in C++.
#pragma once

#include "bf16.cuh"

namespace blink {

// IEEE half has e4m3's three bits of mantissa among its ten, and a bias that is larger by 8.
inline u16 half_of_e4m3(u32 code) {
  const u32 sign = (code & 0x80) << 8, exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return sign | 0x7E00;
  if (exponent > 0) return sign | (exponent + 8) << 10 | mantissa << 7;
  if (mantissa == 0) return sign;
  const u32 shift = mantissa >= 4 ? 0 : mantissa >= 2 ? 1 : 2;  // subnormals of e4m3 are normal halves
  return sign | (8 - shift) << 10 | (mantissa << shift & 3) << 8;
}

inline u32 halves_of_e4m3(u16 codes) {
  return half_of_e4m3(codes & 0xFF) | static_cast<u32>(half_of_e4m3(codes >> 8)) << 16;
}

inline float float_of_half(u16 half) {
  const u32 exponent = half >> 10 & 31, mantissa = half & 1023;
  const float magnitude = exponent == 31  ? mantissa ? NAN : INFINITY
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25);
  return half >> 15 ? -magnitude : magnitude;
}

}  // namespace blink

// The instructions of kernels/float8_instructions.cuh in C++.
#pragma once

#include "f16.cuh"

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

inline uint2 halves_of_e4m3(u32 codes) {
  return {halves_of_e4m3(static_cast<u16>(codes)), halves_of_e4m3(static_cast<u16>(codes >> 16))};
}

// The last code whose number is not above the value's magnitude, or the next: the nearer, of two as near the even one.
inline u32 code_of(float value) {
  const u32 sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7F;
  const auto worth = [](u32 code) { return float_of_half(half_of_e4m3(code)); };
  u32 code = 0;
  while (code < 0x7E && worth(code + 1) <= magnitude) ++code;
  if (code == 0x7E) return sign | code;
  const float below = magnitude - worth(code), above = worth(code + 1) - magnitude;
  return sign | (below < above || (below == above && code % 2 == 0) ? code : code + 1);
}

inline u16 e4m3_of(float low, float high) { return static_cast<u16>(code_of(low) | code_of(high) << 8); }

}  // namespace blink

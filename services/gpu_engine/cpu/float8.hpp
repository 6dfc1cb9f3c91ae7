// The 8-bit float e4m3 (services/gpu_engine/models/float8.py says what it is).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace blink::cpu {

constexpr float kLargestE4M3 = 448.0f;

// The nearest e4m3 number, ties to even; beyond the largest it saturates, NaN stays NaN.
inline float round_to_e4m3(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t exponent = bits >> 23 & 0xff;
  const uint32_t unit_bits = (exponent < 127 - 6 ? 127 - 9 : exponent - 3) << 23;  // 2^-9 among subnormals
  if (!(std::fabs(value) < kLargestE4M3)) return std::isnan(value) ? value : std::copysign(kLargestE4M3, value);
  float unit;
  std::memcpy(&unit, &unit_bits, sizeof unit);
  return std::nearbyint(value / unit) * unit;
}

}  // namespace blink::cpu

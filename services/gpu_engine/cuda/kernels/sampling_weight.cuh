// The numbers that sampling compares, with the roundings of the cpu engine: services/gpu_engine/cpu/sampling.hpp gives
// the order of operations.
#pragma once

#include "bf16.cuh"
#include "services/gpu_engine/core/request.hpp"

namespace blink {

using core::RowSampling;

inline constexpr u32 kVocabulary = BLINK_VOCABULARY;

// A token's place in the order (logit, then lower id): the larger key comes first. NaN comes last, as 0.
__device__ inline u64 order_key(float logit, u32 token) {
  if (!(logit == logit)) return 0;
  const u32 bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0
  const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<u64>(ordered) << 32 | (0xFFFFFFFFu - token);
}

__device__ inline float logit_of(u64 key) {
  const u32 ordered = static_cast<u32>(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}

__device__ inline u32 token_of(u64 key) { return 0xFFFFFFFFu - static_cast<u32>(key); }

// e^x for x in (-80, 0], within 2 ulp: Cody-Waite reduction and Cephes' polynomial, as the cpu engine's `exponential`.
__device__ inline float exponential(float x) {
  const float shifted = fmaf(x, 1.44269504088896341f, 12582912.0f);  // rounds to an integer in the low mantissa bits
  const float n = shifted - 12582912.0f;
  float r = fmaf(n, -0.693359375f, x);
  r = fmaf(n, 2.12194440e-4f, r);
  float y = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
  y = fmaf(y, r, 8.3334519073e-3f);
  y = fmaf(y, r, 4.1665795894e-2f);
  y = fmaf(y, r, 1.6666665459e-1f);
  y = fmaf(y, r, 5.0000001201e-1f);
  y = fmaf(y, r * r, r) + 1.0f;
  return y * __uint_as_float((__float_as_uint(shifted) - 0x4B400000u + 127u) << 23);
}

__device__ inline float weight_of(float logit, float top, float inverse_temperature) {
  const float x = (logit - top) * inverse_temperature;
  return x > -80.0f ? exponential(x) : 0.0f;
}

// In units of 2^-32, an integer, so that sums of it do not depend on their order.
__device__ inline u64 mass_of(float weight) { return static_cast<u64>(static_cast<double>(weight) * 4294967296.0); }

// Philox4x32-10 (Salmon et al., SC 2011): the four random words of tokens 4 * quad to 4 * quad + 3 at this position.
__device__ inline uint4 random_words(u64 seed, u32 quad, u32 position) {
  u32 a = quad, b = position, c = 0, d = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const u32 high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
    const u32 high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
    a = high1 ^ b ^ k0;
    b = low1;
    c = high0 ^ d ^ k1;
    d = low0;
  }
  return make_uint4(a, b, c, d);
}

// When a token arrives in the race: exponentially distributed with the rate `weight`. The word stands for
// (word + 1/2) / 2^32 in (0, 1).
__device__ inline double arrival(u32 word, float weight) {
  return -log1p(-(word + 0.5) * 2.3283064365386963e-10) / weight;
}

}  // namespace blink

// Sixteen float lanes on whatever vectors the target has, for code that is compiled once for each instruction set.
//
// Included inside a translation unit that defines BLINK_ISA, the namespace of that instruction set. Everything has
// internal linkage, and no standard-library templates are used, so the linker can't mix code of different sets.
//
// Sums over lanes and over memory always run in the same order: results depend neither on batch size nor on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define BLINK_INLINE static inline __attribute__((always_inline))

namespace blink::cpu::BLINK_ISA {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth;
constexpr float kMinusInfinity = -__builtin_inff();

typedef float Vector __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef int32_t Integers __attribute__((vector_size(kWidth * 4)));

struct Lanes {
  Vector part[kParts];
};

BLINK_INLINE Vector load_vector(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

BLINK_INLINE Words load_words(const void* from) {
  Words value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

BLINK_INLINE Vector splat_vector(float value) { return value - Vector{}; }

BLINK_INLINE Lanes load(const float* from) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) lanes.part[p] = load_vector(from + p * kWidth);
  return lanes;
}

BLINK_INLINE void store(float* to, const Lanes& lanes) {
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) std::memcpy(to + p * kWidth, &lanes.part[p], sizeof(Vector));
}

BLINK_INLINE Lanes splat(float value) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) lanes.part[p] = splat_vector(value);
  return lanes;
}

// sum + a * b. Compiled with contraction allowed: one rounding where the target has fused multiply-add.
BLINK_INLINE Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& sum) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) lanes.part[p] = a.part[p] * b.part[p] + sum.part[p];
  return lanes;
}

BLINK_INLINE Lanes multiply(const Lanes& a, const Lanes& b) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) lanes.part[p] = a.part[p] * b.part[p];
  return lanes;
}

BLINK_INLINE Lanes larger(const Lanes& a, const Lanes& b) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) lanes.part[p] = a.part[p] > b.part[p] ? a.part[p] : b.part[p];
  return lanes;
}

// Lanes are added pairwise at distance 8, 4, 2, 1.
BLINK_INLINE float sum_of(const Lanes& lanes) {
  float values[kLanes];
  store(values, lanes);
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    for (int i = 0; i < distance; ++i) values[i] += values[i + distance];
  return values[0];
}

BLINK_INLINE float largest_of(const Lanes& lanes) {
  float values[kLanes];
  store(values, lanes);
  float best = values[0];
  for (int i = 1; i < kLanes; ++i) best = values[i] > best ? values[i] : best;
  return best;
}

// Sixteen IEEE half-precision numbers as floats, exactly.
BLINK_INLINE Lanes load_half(const uint16_t* from) {
  Lanes lanes;
#if defined(__AVX512F__)
  lanes.part[0] = (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p)
    lanes.part[p] = (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + p * kWidth)));
#elif defined(__aarch64__)
  for (int p = 0; p < kParts; ++p)
    lanes.part[p] = (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + p * kWidth)));
#else
  for (int p = 0; p < kParts; ++p) {
    Words bits = {};
    for (int i = 0; i < kWidth; ++i) bits[i] = from[p * kWidth + i];
    // Move exponent and mantissa into place and correct the bias by a multiplication: subnormals come out right too.
    const Words magnitude = (bits & 0x7fffu) << 13;
    const Vector value = (Vector)magnitude * 0x1p112f;
    const Words special = (Words)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    lanes.part[p] = (Vector)(((Words)value | special) | (bits & 0x8000u) << 16);
  }
#endif
  return lanes;
}

// Sixteen bfloat16 numbers as floats, exactly.
BLINK_INLINE Lanes load_brain(const uint16_t* from) {
  Lanes lanes;
#if defined(__AVX512F__)
  lanes.part[0] = (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p)
    lanes.part[p] =
        (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + p * kWidth))), 16);
#else
  for (int p = 0; p < kParts; ++p) {
    Words bits;
    for (int i = 0; i < kWidth; ++i) bits[i] = from[p * kWidth + i];
    lanes.part[p] = (Vector)(bits << 16);
  }
#endif
  return lanes;
}

// Sixteen e4m3 numbers divided by 256, exactly: as halves, whose exponent has a bias that is larger by 8.
BLINK_INLINE Lanes load_e4m3_over_256(const uint8_t* from) {
#if defined(__AVX2__)
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)), 8);
  const __m256i halves = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign),
                                         _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
  Lanes lanes;
#if defined(__AVX512F__)
  lanes.part[0] = (Vector)_mm512_cvtph_ps(halves);
#else
  lanes.part[0] = (Vector)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  lanes.part[1] = (Vector)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
  return lanes;
#else
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int magnitude = from[i] & 0x7f;
    halves[i] = static_cast<uint16_t>(magnitude << 7 | (from[i] & 0x80) << 8 | (magnitude == 0x7f ? 0x7c00 : 0));
  }
  return load_half(halves);
#endif
}

// Sixteen signed bytes as floats.
BLINK_INLINE Lanes load_bytes(const int8_t* from) {
  Lanes lanes;
#if defined(__AVX512F__)
  lanes.part[0] = (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p)
    lanes.part[p] =
        (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + p * kWidth))));
#else
  for (int p = 0; p < kParts; ++p) {
    Integers values;
    for (int i = 0; i < kWidth; ++i) values[i] = from[p * kWidth + i];
    lanes.part[p] = __builtin_convertvector(values, Vector);
  }
#endif
  return lanes;
}

// e^x within 2 ulp for x in [-87, 88]; x beyond is brought to that range. Cody-Waite reduction and Cephes' polynomial.
BLINK_INLINE Lanes exponential(const Lanes& x) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    Vector v = x.part[p];
    v = v > -87.0f ? v : splat_vector(-87.0f);
    v = v < 88.0f ? v : splat_vector(88.0f);
    const Vector shifted = v * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low mantissa bits
    const Vector n = shifted - 12582912.0f;
    Vector r = v - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vector y = splat_vector(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const Words power = ((Words)shifted - 0x4b400000u + 127u) << 23;
    lanes.part[p] = y * (Vector)power;
  }
  return lanes;
}

}  // namespace blink::cpu::BLINK_ISA

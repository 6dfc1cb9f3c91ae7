// The KV cache: what its pages hold, where, and what attention multiplies.
//
// It is [layer][page][K, V][kv_head][kPageSize][kHeadDim]. One head's keys of one page are contiguous (4 KB at 16 x 128
// in bf16): a decode warp streams them with 16-byte loads, and a bulk copy can fetch them as one box.
//
// In FP8 a page holds key / key scale and value / value scale, rounded to e4m3; scales are a layer's. Every e4m3 number
// is an IEEE half, and one instruction makes halves of two, where bf16 would take four. So attention over such pages
// has halves as operands: queries too, which the rotary kernel leaves as such, and weights. A half below 2^-14 has
// fewer bits than others, so weights, of which 1 would be the largest, are all times 2^15; so is what divides them.
#pragma once

#include "f16.cuh"
#include "float8_instructions.cuh"
#include "geometry.cuh"

namespace blink {

struct e4m3 {
  unsigned char code;
};

template <class Element>
inline constexpr bool kIsCode = false;
template <>
inline constexpr bool kIsCode<e4m3> = true;

inline constexpr bool kFp8Cache = BLINK_FP8_CACHE;

#if BLINK_FP8_CACHE
using KvElement = e4m3;
using Operand = f16;  // of attention's products
#else
using KvElement = bf16;
using Operand = bf16;
#endif

inline constexpr float kWeightExponent = kFp8Cache ? 15.0f : 0.0f;   // the largest weight is 2 to it
inline constexpr u32 kPacked = sizeof(Operand) / sizeof(KvElement);  // elements in an operand's bytes

inline constexpr u64 kPageHead = static_cast<u64>(kPageSize) * kHeadDim;
inline constexpr u64 kPageValues = kKvHeads * kPageHead;  // from a page's keys to its values
inline constexpr u64 kPageStride = 2 * kPageValues;

__device__ inline u64 page_offset(u32 page, u32 kv_head) { return page * kPageStride + kv_head * kPageHead; }

// What a layer's keys and values were divided by; 1 and unused in bf16.
struct KvScales {
  float key, value;
};

// What attention multiplies scores by, in powers of two, and results.
struct AttentionScales {
  float score, value;

  __device__ AttentionScales(float softmax, const KvScales& cache)
      : score(kFp8Cache ? softmax * cache.key : softmax), value(cache.value) {}

  // The sum that results are divided by.
  __device__ float divisor(float sum) const { return kFp8Cache ? sum / value : sum; }
};

// Two floats as operands; `low` is the first in memory.
__device__ inline u32 pack_operands(float low, float high) {
  if constexpr (kFp8Cache) {
    return pack_f16(low, high);
  } else {
    return pack(low, high);
  }
}

// The operands that 16 bytes of a page are.
__device__ inline void widen(const uint4& raw, uint4 (&operands)[kPacked]) {
  if constexpr (kFp8Cache) {
    const uint2 a = halves_of_e4m3(raw.x), b = halves_of_e4m3(raw.y);
    const uint2 c = halves_of_e4m3(raw.z), d = halves_of_e4m3(raw.w);
    operands[0] = make_uint4(a.x, a.y, b.x, b.y);
    operands[1] = make_uint4(c.x, c.y, d.x, d.y);
  } else {
    operands[0] = raw;
  }
}

__device__ inline uint4 load_raw(const f16* source) { return *reinterpret_cast<const uint4*>(source); }
__device__ inline void store_raw(f16* target, uint4 raw) { *reinterpret_cast<uint4*>(target) = raw; }

__device__ inline void store(f16* target, const Eight& v) {
  store_raw(target, make_uint4(pack_f16(v.value[0], v.value[1]), pack_f16(v.value[2], v.value[3]),
                               pack_f16(v.value[4], v.value[5]), pack_f16(v.value[6], v.value[7])));
}

__device__ inline void store(e4m3* target, const Eight& v) {
  const auto four = [&](u32 i) {
    return e4m3_of(v.value[i], v.value[i + 1]) | static_cast<u32>(e4m3_of(v.value[i + 2], v.value[i + 3])) << 16;
  };
  *reinterpret_cast<uint2*>(target) = make_uint2(four(0), four(4));
}

}  // namespace blink

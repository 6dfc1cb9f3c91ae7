// Storage of bfloat16, conversions, and 16-byte accesses. No CUDA header is needed.
#pragma once

namespace blink {

using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ inline float minus_infinity() { return __int_as_float(0xFF800000); }

struct bf16 {
  u16 bits;
};

__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ inline float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

// Two floats rounded to nearest even; `low` is the first in memory.
__device__ inline u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline bf16 to_bf16(float value) { return {static_cast<u16>(pack(value, 0.0f))}; }

// Eight consecutive elements of a row, as floats.
struct Eight {
  float value[8];
};

__device__ inline Eight unpack(uint4 raw) {
  return {{low_half(raw.x), high_half(raw.x), low_half(raw.y), high_half(raw.y), low_half(raw.z), high_half(raw.z),
           low_half(raw.w), high_half(raw.w)}};
}

__device__ inline uint4 pack(const Eight& v) {
  return make_uint4(pack(v.value[0], v.value[1]), pack(v.value[2], v.value[3]), pack(v.value[4], v.value[5]),
                    pack(v.value[6], v.value[7]));
}

__device__ inline uint4 load_raw(const bf16* source) { return *reinterpret_cast<const uint4*>(source); }
__device__ inline void store_raw(bf16* target, uint4 raw) { *reinterpret_cast<uint4*>(target) = raw; }
__device__ inline Eight load(const bf16* source) { return unpack(load_raw(source)); }
__device__ inline void store(bf16* target, const Eight& v) { store_raw(target, pack(v)); }

__device__ inline Eight load(const float* source) {
  const float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ inline void store(float* target, const Eight& v) {
  reinterpret_cast<float4*>(target)[0] = make_float4(v.value[0], v.value[1], v.value[2], v.value[3]);
  reinterpret_cast<float4*>(target)[1] = make_float4(v.value[4], v.value[5], v.value[6], v.value[7]);
}

}  // namespace blink

// The instructions of kernels/wgmma_narrow.cuh in C++; each is finished when it returns.
#pragma once

#include "mma.cuh"

namespace blink {

inline u64 operand(u32 address, u32 group) {
  if (group != 1024) std::abort();
  return address / 16;
}
inline void begin_products() {}
inline void commit_products() {}
template <u32 kRegisters>
void grab_registers() {}
template <u32 kRegisters>
void yield_registers() {}
template <u32 kPending>
void wait_products() {}
template <u32 kPending, u32 kCount>
void wait_products(float (&)[kCount]) {}

// Element k of a row of an operand in shared memory.
inline float element(u64 operand, u32 row, u32 k) {
  const u64 offset = operand * 16 + row * 128 + k * 2;
  bf16 value;
  std::memcpy(&value, dynamic_memory + (offset ^ (offset >> 7 & 7) << 4), sizeof value);
  return to_float(value);
}

template <u32 kCount, class Element>
void multiply_rows(float (&d)[kCount], const Element& a, u64 b) {
  const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  for (u32 i = 0; i < kCount; ++i) {
    float sum = 0;
    for (u32 k = 0; k < 16; ++k) sum += a(g + i % 4 / 2 * 8, k) * element(b, i / 4 * 8 + 2 * c + i % 2, k);
    d[i] += sum;
  }
}

template <u32 kCount>
void multiply_narrow(float (&d)[kCount], u64 a, u64 b) {
  const u32 first = threadIdx.x / 32 % 4 * 16;
  multiply_rows(d, [&](u32 row, u32 k) { return element(a, first + row, k); }, b);
}

template <u32 kCount>
void multiply_narrow(float (&d)[kCount], const u32 (&a)[4], u64 b) {
  Warp& warp = this_warp();
  const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  warp.barrier.wait();
  for (u32 i = 0; i < 4; ++i) {
    warp.a[g + i % 2 * 8][2 * c + i / 2 * 8] = low_half(a[i]);
    warp.a[g + i % 2 * 8][2 * c + 1 + i / 2 * 8] = high_half(a[i]);
  }
  warp.barrier.wait();
  multiply_rows(d, [&](u32 row, u32 k) { return warp.a[row][k]; }, b);
}

}  // namespace blink

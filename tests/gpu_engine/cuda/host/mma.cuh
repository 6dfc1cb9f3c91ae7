// The instructions of kernels/mma.cuh in C++.
#pragma once

#include "f16.cuh"

namespace blink {

struct Copy {
  unsigned char* target;
  const void* source;
  bool valid;
};
inline bool late_copies = false;                          // they land when they are waited for, else at once
inline thread_local std::vector<Copy> open_copies[1024];  // of each thread
inline thread_local std::deque<std::vector<Copy>> copy_groups[1024];

inline void land(const Copy& copy) {
  if (copy.valid)
    std::memcpy(copy.target, copy.source, 16);
  else
    std::memset(copy.target, 0, 16);
}

inline void copy_async(u32 target, const void* source, bool valid) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16) std::abort();
  const Copy copy = {dynamic_memory + target, source, valid};
  if (late_copies)
    open_copies[threadIdx.x].push_back(copy);
  else
    land(copy);
}

inline void commit_copies() {
  copy_groups[threadIdx.x].push_back(std::move(open_copies[threadIdx.x]));
  open_copies[threadIdx.x].clear();
}

template <u32 kPending>
void wait_copies() {
  auto& groups = copy_groups[threadIdx.x];
  for (; groups.size() > kPending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) land(copy);
  }
}

inline void prefetch(const void*) {}
inline float power_of_two(float x) { return std::exp2(x); }

template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(dynamic_memory);
}

inline u32 transpose_square(u32 pair) {
  const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 first = exchange(pair, 8 * c + g / 2), second = exchange(pair, 8 * c + 4 + g / 2);  // rows 2c and 2c + 1
  return (first >> g % 2 * 16 & 0xFFFF) | second >> g % 2 * 16 << 16;
}

template <class Operand>
float element(u32 pair, u32 i) {
  if constexpr (std::is_same_v<Operand, f16>) {
    return float_of_half(static_cast<u16>(pair >> i * 16));
  } else {
    return i ? high_half(pair) : low_half(pair);
  }
}

template <class Operand>
void multiply_fragments(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& warp = this_warp();
  const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const auto put = [](float* pair, u32 value) {
    pair[0] = element<Operand>(value, 0), pair[1] = element<Operand>(value, 1);
  };
  put(&warp.a[g][2 * c], a0);
  put(&warp.a[g + 8][2 * c], a1);
  put(&warp.a[g][2 * c + 8], a2);
  put(&warp.a[g + 8][2 * c + 8], a3);
  for (u32 i = 0; i < 2; ++i) {
    warp.b[2 * c + i][g] = element<Operand>(b0, i);
    warp.b[2 * c + 8 + i][g] = element<Operand>(b1, i);
  }
  warp.barrier.wait();
  for (u32 i = 0; i < 4; ++i) {
    float sum = 0;
    for (u32 k = 0; k < 16; ++k) sum += warp.a[g + i / 2 * 8][k] * warp.b[k][2 * c + i % 2];
    d[i] += sum;
  }
  warp.barrier.wait();
}

inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_fragments<bf16>(d, a0, a1, a2, a3, b0, b1);
}

template <class Operand>
void mma_low(float (&d)[2], u32 a0, u32 a2, u32 b0, u32 b1) {
  float both[4] = {d[0], d[1], 0, 0};
  multiply_fragments<Operand>(both, a0, 0, a2, 0, b0, b1);
  d[0] = both[0], d[1] = both[1];
}

}  // namespace blink

// Tensor-core and asynchronous-copy instructions that sm_80 and later have.
#pragma once

#include "f16.cuh"

namespace blink {

// d[16, 8] += a[16, 16] b[16, 8], bf16 with fp32 sums. Of lane 4g + c: a holds rows g (a0, a2) and g + 8 (a1, a3) at
// columns 2c, 2c + 1 (a0, a1) and 8 more (a2, a3); b holds column g at the same rows; d rows g and g + 8, columns 2c,
// 2c + 1.
__device__ inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d[8, 8] += a[8, 16] b[16, 8], bf16 or f16 with fp32 sums. Of lane 4g + c: a holds row g at columns 2c, 2c + 1 (a0)
// and 8 more (a2); b holds column g at the same rows; d row g, columns 2c, 2c + 1. The instruction has 16 rows: the
// upper eight are zero and cost no registers.
template <class Operand>
__device__ inline void mma_low(float (&d)[2], u32 a0, u32 a2, u32 b0, u32 b1);

#define BLINK_MMA_LOW(types)                                                             \
  asm("{ .reg .f32 unused0, unused1; mma.sync.aligned.m16n8k16.row.col.f32." types       \
      ".f32 {%0, %1, unused0, unused1}, {%2, %3, %4, %3}, {%5, %6}, {%0, %1, %7, %7}; }" \
      : "+f"(d[0]), "+f"(d[1])                                                           \
      : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.0f))

template <>
__device__ inline void mma_low<bf16>(float (&d)[2], u32 a0, u32 a2, u32 b0, u32 b1) {
  BLINK_MMA_LOW("bf16.bf16");
}

template <>
__device__ inline void mma_low<f16>(float (&d)[2], u32 a0, u32 a2, u32 b0, u32 b1) {
  BLINK_MMA_LOW("f16.f16");
}

#undef BLINK_MMA_LOW

// Transposes 8 x 8 two-byte elements of a warp: lane 4g + c gives row g, columns 2c and 2c + 1, and gets column g, rows
// 2c and 2c + 1.
__device__ inline u32 transpose_square(u32 pair) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// 2^x to about 1e-7, one instruction; 0 for -inf.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 128 bytes on their way into L2.
__device__ inline void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// What the launch gave beyond the kernel's own variables.
template <class T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_memory[];
  return reinterpret_cast<T*>(dynamic_memory);
}

// 16 bytes to shared memory; zeros if not `valid`.
__device__ inline void copy_async(u32 target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace blink

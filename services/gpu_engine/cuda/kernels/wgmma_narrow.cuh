// Warpgroup products with few columns: d[64, N] += a[64, 16] b[N, 16]^T for N = 8, 16, 32 and 64. bf16 operands, b
// K-major in shared memory, a as well or in registers as mma.sync has it; fp32 sums laid out as wgmma.cuh says.
#pragma once

#include "wgmma.cuh"

namespace blink {

#define BLINK_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLINK_SUMS_8(i) BLINK_SUMS_4(i), BLINK_SUMS_4(i + 4)
#define BLINK_SUMS_16(i) BLINK_SUMS_8(i), BLINK_SUMS_8(i + 8)
#define BLINK_FRAGMENT "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define BLINK_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"

__device__ inline void multiply_narrow(float (&d)[4], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : BLINK_SUMS_4(0)
               : "l"(a), "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[8], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
      : BLINK_SUMS_8(0)
      : "l"(a), "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[16], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" BLINK_NAMES_16 "}, %16, %17, 1, 1, 1, 0, 0;"
               : BLINK_SUMS_16(0)
               : "l"(a), "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" BLINK_NAMES_16
      ", "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
      : BLINK_SUMS_16(0), BLINK_SUMS_16(16)
      : "l"(a), "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : BLINK_SUMS_4(0)
               : BLINK_FRAGMENT, "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, "
      "1, 1, 1, 0;"
      : BLINK_SUMS_8(0)
      : BLINK_FRAGMENT, "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" BLINK_NAMES_16
               "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : BLINK_SUMS_16(0)
               : BLINK_FRAGMENT, "l"(b));
}

__device__ inline void multiply_narrow(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" BLINK_NAMES_16
      ", "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, "
      "1, 1, 1, 0;"
      : BLINK_SUMS_16(0), BLINK_SUMS_16(16)
      : BLINK_FRAGMENT, "l"(b));
}

#undef BLINK_FRAGMENT
#undef BLINK_SUMS_4
#undef BLINK_SUMS_8
#undef BLINK_SUMS_16
#undef BLINK_NAMES_16

}  // namespace blink

// Warpgroup products with many columns: d[64, N] += a[64, 16] b[N, 16]^T for N = 64, 96 ... 256. bf16
// operands, both K-major in shared memory; fp32 sums laid out as wgmma.cuh says.
#pragma once

#include "wgmma.cuh"

namespace blink {

#define BLINK_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLINK_SUMS_16(i) BLINK_SUMS_4(i), BLINK_SUMS_4(i + 4), BLINK_SUMS_4(i + 8), BLINK_SUMS_4(i + 12)
#define BLINK_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BLINK_NAMES_32 \
  BLINK_NAMES_16       \
  ", "                 \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BLINK_NAMES_48 \
  BLINK_NAMES_32       \
  ", "                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BLINK_NAMES_64 \
  BLINK_NAMES_48       \
  ", "                 \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BLINK_NAMES_80 \
  BLINK_NAMES_64       \
  ", "                 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define BLINK_NAMES_96 \
  BLINK_NAMES_80       \
  ", "                 \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BLINK_NAMES_112 \
  BLINK_NAMES_96        \
  ", "                  \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define BLINK_NAMES_128 \
  BLINK_NAMES_112       \
  ", "                  \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define BLINK_SUMS_FIRST_16 BLINK_SUMS_16(0)
#define BLINK_SUMS_FIRST_32 BLINK_SUMS_FIRST_16, BLINK_SUMS_16(16)
#define BLINK_SUMS_FIRST_48 BLINK_SUMS_FIRST_32, BLINK_SUMS_16(32)
#define BLINK_SUMS_FIRST_64 BLINK_SUMS_FIRST_48, BLINK_SUMS_16(48)
#define BLINK_SUMS_FIRST_80 BLINK_SUMS_FIRST_64, BLINK_SUMS_16(64)
#define BLINK_SUMS_FIRST_96 BLINK_SUMS_FIRST_80, BLINK_SUMS_16(80)
#define BLINK_SUMS_FIRST_112 BLINK_SUMS_FIRST_96, BLINK_SUMS_16(96)
#define BLINK_SUMS_FIRST_128 BLINK_SUMS_FIRST_112, BLINK_SUMS_16(112)

#define BLINK_WIDE(columns, sums, first, second)                                                       \
  __device__ inline void multiply_wide(float (&d)[sums], u64 a, u64 b) {                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" BLINK_NAMES_##sums \
                 "}, %" #first ", %" #second ", 1, 1, 1, 0, 0;"                                        \
                 : BLINK_SUMS_FIRST_##sums                                                             \
                 : "l"(a), "l"(b));                                                                    \
  }

// The operands' numbers follow those of the sums.
BLINK_WIDE(64, 32, 32, 33)
BLINK_WIDE(96, 48, 48, 49)
BLINK_WIDE(128, 64, 64, 65)
BLINK_WIDE(160, 80, 80, 81)
BLINK_WIDE(192, 96, 96, 97)
BLINK_WIDE(224, 112, 112, 113)
BLINK_WIDE(256, 128, 128, 129)

#undef BLINK_WIDE
#undef BLINK_SUMS_4
#undef BLINK_SUMS_16
#undef BLINK_NAMES_16
#undef BLINK_SUMS_FIRST_16
#undef BLINK_NAMES_32
#undef BLINK_SUMS_FIRST_32
#undef BLINK_NAMES_48
#undef BLINK_SUMS_FIRST_48
#undef BLINK_NAMES_64
#undef BLINK_SUMS_FIRST_64
#undef BLINK_NAMES_80
#undef BLINK_SUMS_FIRST_80
#undef BLINK_NAMES_96
#undef BLINK_SUMS_FIRST_96
#undef BLINK_NAMES_112
#undef BLINK_SUMS_FIRST_112
#undef BLINK_NAMES_128
#undef BLINK_SUMS_FIRST_128

}  // namespace blink

// Matrix products of a warpgroup on Hopper's tensor cores (wgmma, sm_90a): fp32 sums of bf16 or f16 operands.
//
// All four warps issue a product together; it runs on while they go on, until `wait_products`. Sums are laid out as
// those of mma.sync: of lane 4g + c of warp w, d[4n + k] is row 16w + g (k < 2) or 16w + g + 8, column 8n + 2c + k % 2.
#pragma once

#include "f16.cuh"

namespace blink {

// Where an operand lies in shared memory: swizzled by 128 bytes, in atoms of 8 rows of 128 bytes that begin at
// multiples of 1,024. `address` may point 32, 64 or 96 bytes into an atom's first row (the next 16 columns of a K-major
// operand). Strides in bytes: `group` from 8 rows to the next 8; `block`, of an MN-major operand alone, from 64 columns
// to the next 64.
__device__ inline u64 operand(u32 address, u32 group, u32 block = 16) {
  return 1ull << 62 | static_cast<u64>(group / 16) << 32 | static_cast<u64>(block / 16) << 16 |
         (address & 0x3FFFFu) / 16;
}

// Call before the first product, and after any change to registers that the next one reads.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving what computes these values down across this point, or what reads them up.
template <u32 kCount>
__device__ inline void settle(float (&values)[kCount]) {
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Returns when at most kPending groups are still running; `done` holds what is finished by then.
template <u32 kPending, u32 kCount>
__device__ inline void wait_products(float (&done)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  settle(done);
}

// The same while no sums are looked at: between products of one chain.
template <u32 kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define BLINK_SUMS_8(d, i)                                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define BLINK_SUMS_32(d, i) BLINK_SUMS_8(d, i), BLINK_SUMS_8(d, i + 8), BLINK_SUMS_8(d, i + 16), BLINK_SUMS_8(d, i + 24)

// Below each product once for each type of operands, which is part of the instruction's name.
#define BLINK_SHARED_128(types)                                                           \
  asm volatile(                                                                           \
      "{ .reg .pred accumulate; setp.ne.u32 accumulate, %66, 0;\n"                        \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." types                                \
      " "                                                                                 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "%64, %65, accumulate, 1, 1, 0, 0; }"                                               \
      : BLINK_SUMS_32(d, 0), BLINK_SUMS_32(d, 32)                                         \
      : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)))
#define BLINK_REGISTERS_128(types)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." types                                \
               " "                                                                                 \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                            \
               : BLINK_SUMS_32(d, 0), BLINK_SUMS_32(d, 32)                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define BLINK_REGISTERS_64(types)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." types                                 \
               " "                                                                                 \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                            \
               : BLINK_SUMS_32(d, 0)                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d[64, 128] = a[64, 16] b[128, 16]^T, added to d if `accumulate`; both K-major in shared memory.
template <class Operand>
__device__ inline void multiply(float (&d)[64], u64 a, u64 b, bool accumulate);
template <>
__device__ inline void multiply<bf16>(float (&d)[64], u64 a, u64 b, bool accumulate) {
  BLINK_SHARED_128("bf16.bf16");
}
template <>
__device__ inline void multiply<f16>(float (&d)[64], u64 a, u64 b, bool accumulate) {
  BLINK_SHARED_128("f16.f16");
}

// d[64, 128] += a[64, 16] b[16, 128]; a in registers as mma.sync has it, b MN-major in shared memory.
template <class Operand>
__device__ inline void multiply(float (&d)[64], const u32 (&a)[4], u64 b);
template <>
__device__ inline void multiply<bf16>(float (&d)[64], const u32 (&a)[4], u64 b) {
  BLINK_REGISTERS_128("bf16.bf16");
}
template <>
__device__ inline void multiply<f16>(float (&d)[64], const u32 (&a)[4], u64 b) {
  BLINK_REGISTERS_128("f16.f16");
}

// The same for 64 columns.
template <class Operand>
__device__ inline void multiply(float (&d)[32], const u32 (&a)[4], u64 b);
template <>
__device__ inline void multiply<bf16>(float (&d)[32], const u32 (&a)[4], u64 b) {
  BLINK_REGISTERS_64("bf16.bf16");
}
template <>
__device__ inline void multiply<f16>(float (&d)[32], const u32 (&a)[4], u64 b) {
  BLINK_REGISTERS_64("f16.f16");
}

#undef BLINK_SHARED_128
#undef BLINK_REGISTERS_128
#undef BLINK_REGISTERS_64
#undef BLINK_SUMS_8
#undef BLINK_SUMS_32

// Moves registers of the block's pool to or from this warpgroup; a grab waits until they are free.
template <u32 kRegisters>
__device__ inline void grab_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
__device__ inline void yield_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace blink

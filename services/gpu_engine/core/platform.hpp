// What differs between a host and a CUDA compiler: function qualifiers and ordered access to memory that another
// processor reads or writes at the same time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define BLINK_FN __host__ __device__ inline
#define BLINK_RARE_FN __host__ __device__ __noinline__ inline
#else
#define BLINK_FN inline
#define BLINK_RARE_FN inline
#endif
// BLINK_RARE_FN is for what most steps do not run: out of line on the GPU, so that what every step runs fits
// its instruction cache.

namespace blink::core {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

// T is a 32- or 64-bit integer, aligned. Relaxed accesses are single and untorn, nothing more.
template <class T>
BLINK_FN T load_relaxed(const T* word) {
#if defined(__CUDA_ARCH__)
  return *const_cast<const volatile T*>(word);
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

template <class T>
BLINK_FN void store_relaxed(T* word, T value) {
#if defined(__CUDA_ARCH__)
  *const_cast<volatile T*>(word) = value;
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// Later accesses of this thread, and of threads that meet it at a barrier, come after the load.
template <class T>
BLINK_FN T load_acquire(const T* word) {
#if defined(__CUDA_ARCH__)
  T value;
  if constexpr (sizeof(T) == 8) {
    asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  } else {
    asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  }
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Earlier accesses of this thread, and of threads that it met at a barrier, come before the store.
template <class T>
BLINK_FN void store_release(T* word, T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 8) {
    asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  } else {
    asm volatile("st.release.sys.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

template <class T>
BLINK_FN T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
BLINK_FN T larger(T a, T b) {
  return a < b ? b : a;
}

// Copies `bytes` of what is aligned to `alignment`, which the compiler can't see through a void pointer.
template <u32 alignment>
BLINK_FN void copy_aligned(void* target, const void* source, u64 bytes) {
  memcpy(__builtin_assume_aligned(target, alignment), __builtin_assume_aligned(source, alignment), bytes);
}

BLINK_FN u64 divide_up(u64 value, u64 unit) { return (value + unit - 1) / unit; }

}  // namespace blink::core

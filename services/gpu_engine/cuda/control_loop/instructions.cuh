// The control loop's own instructions: the clock, and device memory that it shares with the steps' kernels.
#pragma once

#include "services/gpu_engine/core/platform.hpp"

namespace blink::cuda {

using core::u64;

__device__ inline u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline u64 load_acquire_gpu(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Lighter than __threadfence(), which orders stores before loads too.
__device__ inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ inline void store_release_gpu(u64* word, u64 value) {
  asm volatile("st.release.gpu.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

}  // namespace blink::cuda

// The instructions of control_loop/instructions.cuh in C++.
#pragma once

#include <chrono>

#include "services/gpu_engine/core/platform.hpp"

namespace blink::cuda {

using core::u64;

inline u64 clock_ns() {
  return static_cast<u64>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

inline u64 load_acquire_gpu(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

inline void fence_gpu() {}  // a launch is a release

inline void store_release_gpu(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

}  // namespace blink::cuda

// The counters of kernels/grid_progress.cuh in C++.
#pragma once

#include "bf16.cuh"

namespace blink {

inline void wait_for_phase(const u32* phase, u32 count) {
  while (std::atomic_ref(*const_cast<u32*>(phase)).load(std::memory_order_acquire) < count) {
    yield();
    std::this_thread::yield();
  }
}

inline void report_phase(u32* phase) { std::atomic_ref(*phase).fetch_add(1, std::memory_order_release); }

}  // namespace blink

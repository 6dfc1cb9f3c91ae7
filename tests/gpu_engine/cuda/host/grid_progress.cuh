// The counters and marked words of kernels/grid_progress.cuh in C++.
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

inline void store_marked(u64* target, u32 word, u32 mark) {
  std::atomic_ref(*target).store(static_cast<u64>(mark) << 32 | word, std::memory_order_relaxed);
}

inline uint4 await_marked(const u64* source, u32 mark) {
  u32 words[4];
  for (u32 i = 0; i < 4; ++i) {
    u64 both;
    while ((both = std::atomic_ref(const_cast<u64&>(source[i])).load(std::memory_order_relaxed)) >> 32 != mark) {
      yield();
      std::this_thread::yield();
    }
    words[i] = static_cast<u32>(both);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace blink

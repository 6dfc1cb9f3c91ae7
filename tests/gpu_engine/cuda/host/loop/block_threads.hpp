// One CUDA thread block as real threads, whose accesses a thread sanitizer can watch.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Dim {
  unsigned x, y, z;
};
inline thread_local Dim threadIdx;

// Sleeps rather than spins: there are more threads than processors.
class Barrier {
 public:
  explicit Barrier(unsigned size) : size_(size) {}
  void wait() {
    std::unique_lock lock(mutex_);
    const unsigned mine = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != mine; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  unsigned size_, arrived_ = 0, round_ = 0;
};

inline constexpr unsigned kBlockThreads = BLINK_LOOP_THREADS;
struct Warp {
  Barrier barrier{32};
  std::uint64_t slot[32];
};
inline Barrier block_barrier{kBlockThreads};
inline Warp warps[kBlockThreads / 32];

template <class F>
void run_block(F kernel) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kBlockThreads; ++i) {
    threads.emplace_back([&kernel, i] {
      threadIdx = {i, 0, 0};
      kernel();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void __syncthreads() { block_barrier.wait(); }
inline void __syncwarp() { warps[threadIdx.x / 32].barrier.wait(); }

// use(the values of all lanes)
template <class Use>
auto gather(std::uint64_t value, Use use) {
  Warp& warp = warps[threadIdx.x / 32];
  warp.slot[threadIdx.x % 32] = value;
  warp.barrier.wait();
  const auto result = use(warp.slot);
  warp.barrier.wait();
  return result;
}

template <class T>
T __shfl_sync(unsigned, T value, unsigned source) {
  return static_cast<T>(gather(value, [&](const auto& slot) { return slot[source % 32]; }));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned bits) {
  return __shfl_sync(mask, value, threadIdx.x ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}
inline unsigned __match_any_sync(unsigned, unsigned value) {
  return gather(value, [&](const auto& slot) {
    unsigned group = 0;
    for (unsigned lane = 0; lane < 32; ++lane) group |= unsigned{slot[lane] == value} << lane;
    return group;
  });
}
inline bool __any_sync(unsigned, bool value) {
  return gather(value, [](const auto& slot) {
    bool any = false;
    for (const auto each : slot) any |= each != 0;
    return any;
  });
}
inline bool __all_sync(unsigned mask, bool value) { return !__any_sync(mask, !value); }
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return gather(value, [](const auto& slot) {
    std::uint64_t least = slot[0];
    for (const auto each : slot) least = each < least ? each : least;
    return static_cast<unsigned>(least);
  });
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { std::this_thread::yield(); }

inline unsigned atomicMax(unsigned* word, unsigned value) {
  unsigned found = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (found < value && !__atomic_compare_exchange_n(word, &found, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return found;
}

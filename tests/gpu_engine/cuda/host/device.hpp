// Runs a kernel's blocks on the host, one after the other or, when they wait for each other, in a thread each: what a
// kernel computes and which memory it touches can be checked without a GPU, also with copies that land as late as they
// may. What a block has is a thread's, and what a cluster's blocks have too.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static thread_local
#define __launch_bounds__(...)

[[noreturn]] inline void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

struct Dim {
  unsigned x, y, z;
};
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

struct uint4 {
  unsigned x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

// CUDA threads are contexts that run in turn, each until it waits for others.
struct Context {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool done = false;
};
inline thread_local std::vector<Context> contexts;
inline thread_local ucontext_t scheduler;
inline thread_local unsigned running_context;
inline thread_local const std::function<void()>* running_kernel;

inline void yield() { swapcontext(&contexts[running_context].context, &scheduler); }

class Barrier {
 public:
  explicit Barrier(unsigned size) : size_(size) {}
  void wait() {
    const unsigned mine = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
    }
    while (round_ == mine) yield();
  }

 private:
  unsigned size_, arrived_ = 0, round_ = 0;
};

struct Warp {
  Barrier barrier{32};
  uint64_t slot[32];
  float a[16][16], b[16][8];  // operands of a matrix instruction
};
inline thread_local std::unique_ptr<Barrier> block_barrier;  // of all blocks of a cluster
inline thread_local std::vector<Warp> warps;
inline Warp& this_warp() { return warps[running_context / 32]; }

inline void run_context() {
  (*running_kernel)();
  contexts[running_context].done = true;
}

// The block that blockIdx names, or so many from it on together.
inline void run_block(unsigned threads, unsigned blocks = 1) {
  const unsigned first = blockIdx.x, all = threads * blocks;
  block_barrier = std::make_unique<Barrier>(all);
  warps.assign(all / 32, Warp());
  for (Context& each : contexts) {
    getcontext(&each.context);
    each.done = false;
    each.context.uc_stack = {each.stack.data(), 0, each.stack.size()};
    each.context.uc_link = &scheduler;
    makecontext(&each.context, run_context, 0);
  }
  for (unsigned left = all; left > 0;) {
    for (unsigned i = 0; i < all; ++i) {
      if (contexts[i].done) continue;
      running_context = i;
      threadIdx = {i % threads, 0, 0}, blockIdx.x = first + i / threads;
      swapcontext(&scheduler, &contexts[i].context);
      left -= contexts[i].done;
    }
  }
}

inline void launch(Dim grid, unsigned threads, const std::function<void()>& kernel) {
  gridDim = grid, blockDim = {threads, 1, 1};
  running_kernel = &kernel;
  contexts = std::vector<Context>(threads);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y, 0};
      run_block(threads);
    }
  }
}

// Clusters one after the other, their blocks in turn.
inline void launch_clusters(unsigned clusters, unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  gridDim = {clusters * blocks, 1, 1}, blockDim = {threads, 1, 1};
  running_kernel = &kernel;
  contexts = std::vector<Context>(threads * blocks);
  for (unsigned cluster = 0; cluster < clusters; ++cluster) {
    blockIdx = {cluster * blocks, 0, 0};
    run_block(threads, blocks);
  }
}

// All blocks at once.
inline void launch_together(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::vector<std::thread> running;
  for (unsigned block = 0; block < blocks; ++block) {
    running.emplace_back([&, block] {
      gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1}, blockIdx = {block, 0, 0};
      running_kernel = &kernel;
      contexts = std::vector<Context>(threads);
      run_block(threads);
    });
  }
  for (std::thread& each : running) each.join();
}

inline void __syncthreads() { block_barrier->wait(); }
inline void __syncwarp() { this_warp().barrier.wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <class T>
T exchange(T value, unsigned source) {
  Warp& warp = this_warp();
  std::memcpy(&warp.slot[threadIdx.x % 32], &value, sizeof value);
  warp.barrier.wait();
  T found;
  std::memcpy(&found, &warp.slot[source % 32], sizeof found);
  warp.barrier.wait();
  return found;
}

template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return exchange(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return exchange(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return exchange(value, lane >= distance ? lane - distance : lane);
}
inline unsigned __match_any_sync(unsigned, unsigned value) {
  Warp& warp = this_warp();
  warp.slot[threadIdx.x % 32] = value;
  warp.barrier.wait();
  unsigned same = 0;
  for (unsigned i = 0; i < 32; ++i) same |= static_cast<unsigned>(warp.slot[i] == value) << i;
  warp.barrier.wait();
  return same;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned atomicAdd(unsigned* target, unsigned value) { return std::atomic_ref(*target).fetch_add(value); }
template <class T>
T __ldcg(const T* source) {
  return *source;
}
template <class T>
void __stcg(T* target, T value) {
  *target = value;
}
template <class To, class From>
To bits_as(From value) {
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
inline float __int_as_float(int value) { return bits_as<float>(value); }
inline float __uint_as_float(unsigned value) { return bits_as<float>(value); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
alignas(1024) inline thread_local unsigned char dynamic_memory[512 << 10];
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - dynamic_memory;
}

// Two floats as bfloat16, rounded to nearest even.
inline unsigned pack_pair(float low, float high) {
  const auto round = [](float value) {
    const auto bits = bits_as<uint32_t>(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
}

// Barriers in shared memory and bulk tensor copies that complete on them (sm_90 and later).
#pragma once

#include "bf16.cuh"

namespace blink {

// A CUtensorMap, passed by value as a __grid_constant__ parameter; tensor_map.py encodes it.
struct alignas(64) TensorMap {
  u64 words[16];
};

// An mbarrier: its phase ends when `arrivals` have come and the bytes expected in it have been copied.
struct alignas(8) CopyBarrier {
  u64 state;

  __device__ void init(u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }

  // Counts as so many arrivals.
  __device__ void arrive(u32 count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(count) : "memory");
  }

  // Arrives, and keeps the phase open until `bytes` more have been copied.
  __device__ void arrive_expecting(u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }

  // Returns once the phase of this parity has ended; the parity before the first phase, 1, counts as ended.
  __device__ void wait(u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// Makes initialized barriers visible to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's ordinary accesses to shared memory before later ones by copy engine and tensor cores.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of global memory: call after what tells that somebody's ordinary writes are done, before a copy of them.
__device__ inline void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void copy_box(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&done))
      : "memory");
}

// Fetches the map itself, so that the first copy doesn't wait for it.
__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ inline void copy_box(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&done))
      : "memory");
}

__device__ inline void copy_box(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z, u32 w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(&done))
      : "memory");
}

// The same of what nobody else will read: the L2 cache gives it up first.
inline constexpr u64 kEvictFirst = 0x12F0000000000000ull;  // as createpolicy.fractional.L2::evict_first makes it

__device__ inline void copy_once(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&done)), "l"(kEvictFirst)
      : "memory");
}

__device__ inline void copy_once(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z, u32 w,
                                 u32 v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(&done)), "l"(kEvictFirst)
      : "memory");
}

}  // namespace blink

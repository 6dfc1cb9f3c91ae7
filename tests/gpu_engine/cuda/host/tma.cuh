// The barriers and copies of kernels/tma.cuh in C++. Copies land at once, or one at a time while somebody waits.
#pragma once

#include "bf16.cuh"

namespace blink {

inline constexpr u32 kMostRank = 5;

struct TensorMap {
  const unsigned char* base;
  u32 rank;
  u64 shape[kMostRank], strides[kMostRank], box[kMostRank];  // two-byte elements; strides in bytes
};

inline TensorMap map_of(const void* base, std::vector<u64> shape, std::vector<u64> strides, std::vector<u64> box) {
  TensorMap map = {
      static_cast<const unsigned char*>(base), static_cast<u32>(shape.size()), {1, 1, 1, 1, 1}, {2}, {1, 1, 1, 1, 1}};
  std::copy(shape.begin(), shape.end(), map.shape);
  std::copy(strides.begin(), strides.end(), map.strides + 1);
  std::copy(box.begin(), box.end(), map.box);
  return map;
}

struct alignas(8) CopyBarrier {
  unsigned char arrivals, arrived, phase, unused;
  i32 bytes;

  void init(u32 count) { *this = {static_cast<unsigned char>(count), 0, 0, 0, 0}; }
  void arrive(u32 count = 1) { arrived += static_cast<unsigned char>(count), end_phase(); }
  void arrive_expecting(u32 more) { bytes += static_cast<i32>(more), arrive(); }
  void copied(u32 count) { bytes -= static_cast<i32>(count), end_phase(); }
  void end_phase() {
    if (arrived == arrivals && bytes == 0) arrived = 0, phase ^= 1;
  }
  void wait(u32 parity);
};

struct BoxCopy {
  unsigned char* target;
  const TensorMap* map;
  CopyBarrier* done;
  u64 at[kMostRank];

  // Swizzled by 128 bytes: 16-byte pieces of a row are exchanged by the row's number in its eight.
  void land() const {
    u64 offset = reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(dynamic_memory);
    if (offset % 1024) std::abort();
    const u64 begin = offset;
    land(kMostRank, map->base, true, offset);
    done->copied(static_cast<u32>(offset - begin));
  }

 private:
  void land(u32 rank, const unsigned char* source, bool inside, u64& offset) const {
    if (rank == 0) {
      unsigned char* to = dynamic_memory + (offset ^ (offset >> 7 & 7) << 4);
      if (inside)
        std::memcpy(to, source, 2);
      else
        std::memset(to, 0, 2);
      offset += 2;
      return;
    }
    const u32 d = rank - 1;
    for (u64 i = at[d]; i < at[d] + map->box[d]; ++i)
      land(d, source + i * map->strides[d], inside && i < map->shape[d], offset);
  }
};
inline bool late_boxes = false;
inline thread_local std::deque<BoxCopy> open_boxes;

inline void CopyBarrier::wait(u32 parity) {
  while (phase == parity) {
    if (!open_boxes.empty()) {
      open_boxes.front().land();
      open_boxes.pop_front();
    } else {
      yield();
    }
  }
}

inline void copy_box(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z = 0, u32 w = 0,
                     u32 v = 0) {
  const BoxCopy copy = {static_cast<unsigned char*>(target), &map, &done, {x, y, z, w, v}};
  if (late_boxes)
    open_boxes.push_back(copy);
  else
    copy.land();
}
inline void copy_once(void* target, const TensorMap& map, CopyBarrier& done, u32 x, u32 y, u32 z, u32 w = 0,
                      u32 v = 0) {
  copy_box(target, map, done, x, y, z, w, v);
}

inline void prefetch_map(const TensorMap&) {}
inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline void fence_async_proxy_global() {}

}  // namespace blink

// kernels/warpgroup.cuh in C++.
#pragma once

#include "bf16.cuh"

namespace blink {

inline constexpr u32 kWarps = 4, kWarpgroup = kWarps * 32, kAlone = 3;

inline u32 warp_in_group() { return threadIdx.x / 32 % kWarps; }
inline u32 thread_in_group() { return threadIdx.x % kWarpgroup; }

struct Meeting {
  u32 arrived = 0, round = 0;
};
inline thread_local Meeting meetings[16];  // the hardware barriers of a block

inline void wait_at(u32 barrier, u32 threads) {
  Meeting& here = meetings[barrier];
  const u32 mine = here.round;
  if (++here.arrived == threads) here.arrived = 0, ++here.round;
  while (here.round == mine) yield();
}

inline void synchronize_warpgroup() { wait_at(kAlone + threadIdx.x / kWarpgroup, kWarpgroup); }

}  // namespace blink

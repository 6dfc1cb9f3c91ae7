// How far the blocks of a launch have come: a counter for each phase, in global memory, zero at the launch's beginning.
// The launch's blocks must all be resident, because they wait for each other.
#pragma once

#include "bf16.cuh"

namespace blink {

// Returns once `count` blocks have reported the phase: what they wrote before is visible to this thread, and to those
// that it meets at a barrier afterwards.
__device__ inline void wait_for_phase(const u32* phase, u32 count) {
  u32 reported;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(reported) : "l"(phase) : "memory");
  } while (reported < count);
}

// Call by one thread, after a barrier of those whose writes are reported.
__device__ inline void report_phase(u32* phase) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(phase) : "memory");
}

}  // namespace blink

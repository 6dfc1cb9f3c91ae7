// Where a thread is in a ring of stages.
#pragma once

#include "bf16.cuh"

namespace blink {

// A stage of the ring, and the parity of its phase.
struct Slot {
  u32 stage = 0, parity = 0;

  __device__ void advance(u32 stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }

  __device__ void skip(u32 count, u32 stages) {
    stage += count;
    parity ^= stage / stages % 2;
    stage %= stages;
  }
};

}  // namespace blink

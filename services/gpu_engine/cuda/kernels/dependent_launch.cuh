// Programmatic dependent launch (sm_90): a kernel begins while the one before it still runs.
//
// The rule that keeps a chain of such kernels in order: every block of every kernel calls wait_for_predecessor before
// it reads what another kernel of the step wrote, before it writes anything at all, and before it ends. The wait
// returns when the kernel before has ended and its writes are visible; that one waited too, so all earlier ones have
// ended as well. Only what no kernel writes (weights) may be read before.
//
// When the next kernel may begin is a build's choice, BLINK_TRIGGER; results don't depend on it (bench/overlap.py):
//   0  where the kernel says let_successor_begin: so early that launches queue up as far as there is room
//   1  once it has waited for its own predecessor: two kernels at a time
//   2  when it ends: hides nothing but the launch itself
#pragma once

#ifndef BLINK_TRIGGER
#define BLINK_TRIGGER 0
#endif

namespace blink {

enum class Trigger { kEarly, kAfterWait, kAtEnd };
inline constexpr Trigger kTrigger = static_cast<Trigger>(BLINK_TRIGGER);

__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if constexpr (kTrigger == Trigger::kAfterWait) launch_dependents();
}

// The next kernel may begin once every block has called this or ended. Any moment is safe, because the next one waits:
// early hides its launch, late leaves this one the memory and the multiprocessors' room.
__device__ inline void let_successor_begin() {
  if constexpr (kTrigger == Trigger::kEarly) launch_dependents();
}

}  // namespace blink

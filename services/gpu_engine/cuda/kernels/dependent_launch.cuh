// Programmatic dependent launch (sm_90): a kernel begins while the one before it still runs.
//
// The rule that keeps a chain of such kernels in order: every block of every kernel calls wait_for_predecessor before
// it reads what another kernel of the step wrote, before it writes anything at all, and before it ends. The wait
// returns when the kernel before has ended and its writes are visible; that one waited too, so all earlier ones have
// ended as well. Only what no kernel writes (weights) may be read before.
#pragma once

namespace blink {

__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once every block has called this or ended. Any moment is safe, because the next one waits:
// early hides its launch, late leaves this one the memory and the multiprocessors' room.
__device__ inline void let_successor_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace blink

// How far the blocks of a launch have come: a counter for each phase, in global memory, zero at the launch's beginning.
// And results that need neither counter nor fence, because each word carries a mark that says whose it is: a number
// that comes again only after 2^32 products. The last mark that a word had is another one, so nobody need clear it.
// Marks order only what depends on the words' values. What is written anew a layer later waits for such a word, and the
// reports in between have put what was there before into the L2 cache, where all blocks look for it.
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

// Stores a word with the mark that its reader waits for: another than what was stored there before.
__device__ inline void store_marked(u64* target, u32 word, u32 mark) {
  const u64 both = static_cast<u64>(mark) << 32 | word;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(both) : "memory");
}

// Returns four successive words once all have the mark. `source` is a multiple of 16.
__device__ inline uint4 await_marked(const u64* source, u32 mark) {
  u64 a, b, c, d;
  do {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(source) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(c), "=l"(d) : "l"(source + 2) : "memory");
  } while (a >> 32 != mark || b >> 32 != mark || c >> 32 != mark || d >> 32 != mark);
  return make_uint4(static_cast<u32>(a), static_cast<u32>(b), static_cast<u32>(c), static_cast<u32>(d));
}

}  // namespace blink

// When each step's kernels begin and end, for bench/step_times.py.

namespace blink {

using u64 = unsigned long long;

struct Times {
  u64 begin;
  u64 end;
};

__device__ inline u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

extern "C" __global__ void step_begins(Times* times, u64* number, u64 kept) {
  times[(*number)++ % kept].begin = now_ns();
}

extern "C" __global__ void step_ends(Times* times, const u64* number, u64 kept) {
  times[(*number - 1) % kept].end = now_ns();
}

}  // namespace blink

// A step that costs next to nothing, with the time of its first and last kernel, for bench/control_loop.py.
#include "services/gpu_engine/cuda/control_loop/loop.cuh"

namespace blink::cuda {

struct Times {
  u64 begin;
  u64 end;
  u64 rows;
};
inline constexpr u32 kKept = 8192;

struct BenchStep {
  u64 counts, sampling, tokens, logprobs;
  u64 times;   // Times [kKept]
  u64 number;  // u64: steps begun
  u32 vocabulary;
};

template <class T>
__device__ T* at(u64 address) {
  return reinterpret_cast<T*>(address);
}

__device__ u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// The first kernel; the step takes at least `ns` nanoseconds.
extern "C" __global__ void bench_begin(BenchStep s, u64 ns) {
  const u64 begin = now_ns();
  Times& times = at<Times>(s.times)[(*at<u64>(s.number))++ % kKept];
  times.begin = begin;
  times.rows = at<StepCounts>(s.counts)->rows;
  while (now_ns() - begin < ns) {
  }
}

// The last one.
extern "C" __global__ void bench_end(BenchStep s) {
  for (u32 sample = threadIdx.x; sample < at<StepCounts>(s.counts)->samples; sample += blockDim.x) {
    const core::RowSampling& how = at<core::RowSampling>(s.sampling)[sample];
    at<i32>(s.tokens)[sample] = (how.history_length * 31 + how.seed) % s.vocabulary;
    at<float>(s.logprobs)[sample] = 0.0f;
  }
  __syncthreads();
  if (threadIdx.x == 0) at<Times>(s.times)[(*at<u64>(s.number) - 1) % kKept].end = now_ns();
}

}  // namespace blink::cuda

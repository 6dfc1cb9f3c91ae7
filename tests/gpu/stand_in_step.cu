// A step without a model, for tests of the control loop: its KV cache holds token ids, and what it samples is a
// function of what it reads back through the page table. A page that is shared, lost or stale, or a position computed
// twice or never, changes the tokens that a request gets. tests/gpu_engine/core/machine.py has the same function in
// Python.
#include "services/gpu_engine/cuda/control_loop/loop.cuh"

namespace blink::cuda {

struct StandIn {
  u64 counts, token_ids, positions, row_start, kv_length, sequence, page_table, sample_row, sampling, history;
  u64 tokens, logprobs, top_tokens, top_logprobs;
  u64 cache;   // int32 [page_count * page_size]
  u64 faults;  // u64: how often the step or the cache was not what it must be
  u32 pages_per_sequence;
  u32 page_size;
  u32 vocabulary;
};

template <class T>
__device__ T* at(u64 address) {
  return reinterpret_cast<T*>(address);
}

__device__ const StepCounts& counts_of(const StandIn& s) { return *at<StepCounts>(s.counts); }

__device__ void fault(const StandIn& s) { atomicAdd(at<unsigned long long>(s.faults), 1ull); }

__device__ i32* cell(const StandIn& s, u32 row, u32 position) {
  const u64 line = static_cast<u64>(at<i32>(s.sequence)[row]) * s.pages_per_sequence;
  const i32 page = at<i32>(s.page_table)[line + position / s.page_size];
  return at<i32>(s.cache) + static_cast<u64>(page) * s.page_size + position % s.page_size;
}

// zlib.crc32(word in memory order, crc).
__device__ u32 crc32(u32 crc, u32 word) {
  crc = ~crc ^ word;
  for (u32 bit = 0; bit < 32; ++bit) crc = crc >> 1 ^ (0xEDB88320u & -(crc & 1));
  return ~crc;
}

// One block a row. `decode`: of the graphs for rows of one token each, which must have all steps of such rows up to
// `most_decode`.
extern "C" __global__ void stand_in_write(StandIn s, u32 bucket, u32 decode, u32 most_decode) {
  const StepCounts counts = counts_of(s);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (counts.tokens == 0 || counts.tokens > bucket) fault(s);
    if ((counts.tokens == counts.rows && counts.rows <= most_decode) != (decode != 0)) fault(s);
  }
  if (blockIdx.x >= counts.rows) return;
  const u32 row = blockIdx.x;
  const u32 first = at<i32>(s.row_start)[row], end = at<i32>(s.row_start)[row + 1];
  for (u32 token = first + threadIdx.x; token < end; token += blockDim.x) {
    const u32 position = at<i32>(s.positions)[token];
    if (position != at<i32>(s.kv_length)[row] - (end - token)) fault(s);
    *cell(s, row, position) = at<i32>(s.token_ids)[token];
  }
}

// One thread a sample.
extern "C" __global__ void stand_in_sample(StandIn s) {
  const u32 sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= counts_of(s).samples) return;
  const u32 row = at<i32>(s.sample_row)[sample];
  const core::RowSampling& how = at<core::RowSampling>(s.sampling)[sample];
  const u32 length = at<i32>(s.kv_length)[row];
  const u32* history = at<u32>(s.history) + how.history_offset;
  if (length != how.history_length) fault(s);
  u32 crc = static_cast<u32>(how.seed);
  for (u32 position = 0; position < length; ++position) {
    const u32 token = *cell(s, row, position);
    if (token != history[position]) fault(s);
    crc = crc32(crc, token);
  }
  u32 token = crc % s.vocabulary;
  for (u32 i = 0; i < how.suppress_count; ++i) {
    if (how.suppress[i] != token) continue;
    token = (token + 1) % s.vocabulary;
    i = ~0u;  // look at all of them again
  }
  at<i32>(s.tokens)[sample] = token;
  at<float>(s.logprobs)[sample] = -static_cast<float>(token);
  for (u32 i = 0; i < ring::kMaxTopLogprobs; ++i) {
    at<i32>(s.top_tokens)[sample * ring::kMaxTopLogprobs + i] = (token + i) % s.vocabulary;
    at<float>(s.top_logprobs)[sample * ring::kMaxTopLogprobs + i] = 0.0f;
  }
}

// A step that takes `ns` nanoseconds.
extern "C" __global__ void stand_in_delay(u64 ns) {
  u64 begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

// Ends the engine as an illegal access of a model's kernel would, once a prompt says so.
extern "C" __global__ void stand_in_trap(StandIn s, i32 token) {
  if (counts_of(s).tokens > 0 && at<i32>(s.token_ids)[0] == token) asm volatile("trap;");
}

// The same for a failed assertion.
extern "C" __global__ void stand_in_assert(StandIn s, i32 token) {
  assert(counts_of(s).tokens == 0 || at<i32>(s.token_ids)[0] != token);
}

}  // namespace blink::cuda

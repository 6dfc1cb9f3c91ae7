// From logits to a token, its log-probability and the likeliest alternatives, for every sampled row.
//
// The order of operations, random numbers and ties are those of services/gpu_engine/cpu/sampling.hpp: penalties,
// suppression, temperature, top_k, top_p, min_p, then a race of exponentially distributed arrivals (no sum of floats,
// so no order matters). A function of (logits, history, parameters, seed, position) alone.
//
// One block of 1,024 threads a row. Logits stay as they are; penalties apply as they are read, through marks that the
// block sets in scratch memory and clears again. Greedy reads the logits once, a plain race twice, top_k and top_p five
// to eight times; they come from the L2 cache. Bound by one multiprocessor's bandwidth at small batches.
#include "dependent_launch.cuh"
#include "sampling_cut.cuh"
#include "step.cuh"

namespace blink {

struct SampleResult {
  i32* tokens;          // [samples]
  float* logprobs;      // [samples]
  i32* top_tokens;      // [samples, kMaxTopLogprobs]
  float* top_logprobs;  // likewise
};

struct Arrival {
  double time;
  u32 token;
};

template <>
__device__ inline Arrival shuffle_down(Arrival value, u32 distance) {
  return {__shfl_down_sync(0xFFFFFFFFu, value.time, distance), __shfl_down_sync(0xFFFFFFFFu, value.token, distance)};
}

__device__ inline bool adjusts(const RowSampling& row) {
  return row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f ||
         row.suppress_count != 0;
}

__device__ inline void set_marks(const RowSampling& row, const u32* history, u32* marks) {
  for (u32 i = threadIdx.x; i < row.history_length; i += kSampleThreads) {
    const u32 token = history[i];
    if (token >= kVocabulary) continue;
    atomicOr(marks + token, kMarkSeen);
    if (i >= row.prompt_tokens) atomicAdd(marks + token, 1u);
  }
  for (u32 i = threadIdx.x; i < row.suppress_count; i += kSampleThreads) {
    if (row.suppress[i] < kVocabulary) atomicOr(marks + row.suppress[i], kMarkSuppressed);
  }
  __syncthreads();
}

__device__ inline void clear_marks(const RowSampling& row, const u32* history, u32* marks) {
  for (u32 i = threadIdx.x; i < row.history_length; i += kSampleThreads) {
    if (history[i] < kVocabulary) marks[history[i]] = 0;
  }
  for (u32 i = threadIdx.x; i < row.suppress_count; i += kSampleThreads) {
    if (row.suppress[i] < kVocabulary) marks[row.suppress[i]] = 0;
  }
}

// The key of the largest logit, of equals that with the lowest id; token 0's if all are NaN.
__device__ inline u64 first_of_order(const Logits& logits) {
  float largest = minus_infinity();
  u32 first = threadIdx.x * 4;  // the lowest of this thread's, if all are -inf
  logits.each<4>([&](u32 token, float logit) {
    if (logit > largest) largest = logit, first = token;
  });
  return block_largest(first < kVocabulary ? order_key(largest, first) : 0);
}

// What top_k, top_p and min_p leave is in the race: keys from `first_key`, weights from `min_p`. kVocabulary: nobody
// is.
__device__ inline u32 race(const Logits& logits, const RowSampling& row, float top, float inverse_temperature,
                           u64 first_key) {
  Arrival soonest = {__longlong_as_double(0x7FF0000000000000ll), kVocabulary};
  float bound = __int_as_float(0x7F800000);
  for (u32 tile = 0; tile < kVocabulary; tile += kSampleThreads * 4) {
    const u32 first = tile + threadIdx.x * 4;
    float logit[4], weight[4] = {};
    bool any = false;
    if (first < kVocabulary) {
      logits.four(first, logit);
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        weight[k] = weight_of(logit[k], top, inverse_temperature);
        if (weight[k] < row.min_p || order_key(logit[k], first + k) < first_key) weight[k] = 0.0f;
        any |= weight[k] > 0.0f;
      }
    }
    // An arrival is later than uniform / weight, so most tokens are out without a logarithm. The bound is a little
    // above the warp's soonest, to be safe from rounding.
    bool sooner = false;
    if (any) {
      const uint4 words = random_words(row.seed, first / 4, row.history_length);
      const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const float uniform = static_cast<float>(word[k] >> 8) * 5.9604644775390625e-8f;
        if (!(weight[k] > 0.0f) || !(uniform < bound * weight[k])) continue;
        const double time = arrival(word[k], weight[k]);
        if (time < soonest.time) {
          soonest = {time, first + k};
          bound = fminf(bound, static_cast<float>(time) * 1.0001f);
          sooner = true;
        }
      }
    }
    if (__any_sync(0xFFFFFFFFu, sooner)) {
#pragma unroll
      for (u32 distance = 16; distance > 0; distance /= 2) {
        bound = fminf(bound, __shfl_xor_sync(0xFFFFFFFFu, bound, distance));
      }
    }
  }
  return block_combine(soonest,
                       [](const Arrival& a, const Arrival& b) {
                         return b.time < a.time || (b.time == a.time && b.token < a.token) ? b : a;
                       })
      .token;
}

__device__ inline u32 choose(const Logits& logits, const RowSampling& row, CutShared& shared) {
  const bool limited = row.top_k != 0 && row.top_k < kVocabulary, cuts = limited || row.top_p < 1.0f;
  const u64 best = first_of_order(logits);
  const float top = logit_of(best);
  if (row.temperature == 0.0f || !(top > minus_infinity())) return token_of(best);

  const float inverse_temperature = __fdiv_rn(1.0f, row.temperature);
  u64 first_key = 0;
  if (cuts) {
    Cutter cutter(logits, shared, top, inverse_temperature);
    u64 total = 0;
    if (limited) {
      const Cut cut = cutter.cut(row.top_k, false);
      first_key = cut.key;
      total = cut.mass;
    } else {
      logits.each([&](u32, float logit) { total += mass_of(weight_of(logit, top, inverse_temperature)); });
      total = block_total(total);
    }
    if (row.top_p < 1.0f) {
      const u64 enough = static_cast<u64>(static_cast<double>(row.top_p) * static_cast<double>(total));
      first_key = cutter.cut(enough > 0 ? enough : 1, true).key;
    }
  }
  const u32 winner = race(logits, row, top, inverse_temperature, first_key);
  return winner < kVocabulary ? winner : token_of(best);
}

// log(sum(exp(logits)))
__device__ inline double log_normalizer(const Logits& raw, float top) {
  double sum = 0.0;
  raw.each([&](u32, float logit) { sum += weight_of(logit, top, 1.0f); });
  return top + log(block_total(sum));
}

// Writes the `count` likeliest tokens, best first.
__device__ inline void alternatives(const Logits& raw, float top, double normalizer, u32 count, CutShared& shared,
                                    i32* tokens, float* logprobs) {
  __shared__ u64 likeliest[ring::kMaxTopLogprobs];
  __shared__ u32 found;
  const u64 last = Cutter(raw, shared, top, 1.0f).cut(count, false).key;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  raw.each([&](u32 token, float logit) {
    const u64 key = order_key(logit, token);
    if (key < last) return;
    const u32 place = atomicAdd(&found, 1u);
    if (place < ring::kMaxTopLogprobs) likeliest[place] = key;
  });
  __syncthreads();
  if (threadIdx.x >= count || threadIdx.x >= found) return;
  const u64 key = likeliest[threadIdx.x];
  u32 rank = 0;
  for (u32 i = 0; i < min(found, count); ++i) rank += likeliest[i] > key;
  tokens[rank] = token_of(key);
  logprobs[rank] = static_cast<float>(logit_of(key) - normalizer);
}

extern "C" __global__ void __launch_bounds__(kSampleThreads)
    sample(Step step, const RowSampling* sampling, const u32* history, const float* logits, u32* marks,
           SampleResult result) {
  __shared__ CutShared shared;
  let_successor_begin();
  wait_for_predecessor();
  const u32 sample = blockIdx.x;
  if (sample >= step.counts->samples) return;
  const RowSampling& row = sampling[sample];
  const u32* tokens = history + row.history_offset;
  marks += static_cast<u64>(sample) * kVocabulary;
  const Logits raw = {logits + static_cast<u64>(sample) * kVocabulary, nullptr, 1.0f, 0.0f, 0.0f};

  const bool adjusted = adjusts(row);
  if (adjusted) set_marks(row, tokens, marks);
  const Logits logits_of_row = {raw.raw, adjusted ? marks : nullptr, row.repetition_penalty, row.presence_penalty,
                                row.frequency_penalty};
  const u32 token = choose(logits_of_row, row, shared);
  if (adjusted) clear_marks(row, tokens, marks);
  if (threadIdx.x == 0) result.tokens[sample] = token, result.logprobs[sample] = 0.0f;
  if (row.logprobs == 0 && row.top_logprobs == 0) return;

  const float top = logit_of(first_of_order(raw));
  const double normalizer = log_normalizer(raw, top);
  if (threadIdx.x == 0) result.logprobs[sample] = static_cast<float>(raw.raw[token] - normalizer);
  if (const u32 count = min(min(row.top_logprobs, ring::kMaxTopLogprobs), kVocabulary)) {
    const u32 at = sample * ring::kMaxTopLogprobs;
    alternatives(raw, top, normalizer, count, shared, result.top_tokens + at, result.top_logprobs + at);
  }
}

}  // namespace blink

// Finds where top_k and top_p cut the order (logit, then lower id), without sorting the vocabulary.
//
// Tokens are counted into bins of equal width in logit, from the largest logit down; twice the mean's distance is
// covered, so a bin holds a few hundred tokens whatever the logits' scale. The cut lies in one bin, whose few tokens
// are sorted. A bin with too many (many equal logits) falls back to a binary search over all 64 bits of the order key.
#pragma once

#include "sampling_block.cuh"

namespace blink {

inline constexpr u32 kBins = 2 * kSampleThreads;
inline constexpr u32 kCandidates = 2 * kSampleThreads;

struct CutShared {
  u64 bin_mass[kBins];
  u64 candidates[kCandidates];
  u32 bin_count[kBins];
  u32 found;     // candidates
  u32 bin;       // where the cut lies
  u64 above;     // amount in the bins before it
  u64 last_key;  // of the last token kept
  u64 mass;      // of all tokens kept
};

// The first tokens of the order: those whose key is at least `key`. `mass` is theirs together.
struct Cut {
  u64 key;
  u64 mass;
};

class Cutter {
 public:
  __device__ Cutter(const Logits& logits, CutShared& shared, float top, float inverse_temperature)
      : logits_(logits), shared_(shared), top_(top), inverse_temperature_(inverse_temperature) {
    double sum = 0.0;
    u32 finite = 0;
    logits.each([&](u32, float logit) {
      if (logit > minus_infinity()) sum += logit, ++finite;
    });
    const float mean = static_cast<float>(block_total(sum) / block_total(finite));
    bins_per_unit_ = top > mean ? kBins / 2 / (top - mean) : 0.0f;
  }

  // The fewest first tokens whose number is at least `amount`, or whose mass is, when `by_mass`.
  __device__ Cut cut(u64 amount, bool by_mass) {
    count_bins();
    find_bin(amount, by_mass);
    gather();
    return shared_.found <= kCandidates ? cut_in_bin(amount, by_mass) : search(amount, by_mass);
  }

 private:
  __device__ u32 bin_of(float logit) const {
    const float distance = (top_ - logit) * bins_per_unit_;
    return distance < kBins - 1 ? static_cast<u32>(distance) : kBins - 1;  // the last for -inf and NaN, too
  }

  __device__ u64 mass(float logit) const { return mass_of(weight_of(logit, top_, inverse_temperature_)); }

  __device__ void count_bins() {
    for (u32 i = threadIdx.x; i < kBins; i += kSampleThreads) shared_.bin_count[i] = 0, shared_.bin_mass[i] = 0;
    if (threadIdx.x == 0) shared_.found = 0, shared_.bin = kBins, shared_.above = 0, shared_.last_key = 0;
    __syncthreads();
    logits_.each([&](u32, float logit) {
      const u32 bin = bin_of(logit);
      atomicAdd(&shared_.bin_count[bin], 1u);
      if (const u64 m = mass(logit)) atomicAdd(&shared_.bin_mass[bin], m);
    });
    __syncthreads();
  }

  __device__ void find_bin(u64 amount, bool by_mass) {
    const u32 first = 2 * threadIdx.x;
    const u64 a = by_mass ? shared_.bin_mass[first] : shared_.bin_count[first];
    const u64 b = by_mass ? shared_.bin_mass[first + 1] : shared_.bin_count[first + 1];
    const u64 before = block_before(a + b);
    if (before < amount && amount <= before + a + b) {
      const bool second = before + a < amount;
      shared_.bin = first + second;
      shared_.above = second ? before + a : before;
    }
    __syncthreads();
  }

  __device__ void gather() {
    const u32 bin = shared_.bin;
    logits_.each([&](u32 token, float logit) {
      if (bin_of(logit) != bin) return;
      const u32 place = atomicAdd(&shared_.found, 1u);
      if (place < kCandidates) shared_.candidates[place] = order_key(logit, token);
    });
    __syncthreads();
  }

  __device__ Cut cut_in_bin(u64 amount, bool by_mass) {
    sort_candidates();
    const u32 first = 2 * threadIdx.x, found = shared_.found;
    const u64 key[2] = {shared_.candidates[first], shared_.candidates[first + 1]};
    u64 mass_here[2], worth[2];
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
      mass_here[k] = first + k < found ? mass(logit_of(key[k])) : 0;
      worth[k] = by_mass ? mass_here[k] : first + k < found;
    }
    u64 before = shared_.above + block_before(worth[0] + worth[1]);
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
      if (before < amount && amount <= before + worth[k]) shared_.last_key = key[k];
      before += worth[k];
    }
    __syncthreads();
    const u64 last = shared_.last_key;
    u64 kept = 0;
    for (u32 i = threadIdx.x; i < kBins; i += kSampleThreads) kept += i < shared_.bin ? shared_.bin_mass[i] : 0;
#pragma unroll
    for (u32 k = 0; k < 2; ++k) kept += first + k < found && key[k] >= last ? mass_here[k] : 0;
    return {last, block_total(kept)};
  }

  // Bitonic, largest first.
  __device__ void sort_candidates() {
    for (u32 i = threadIdx.x; i < kCandidates; i += kSampleThreads) {
      if (i >= shared_.found) shared_.candidates[i] = 0;
    }
    __syncthreads();
    u32 size = 2;
    while (size < shared_.found) size *= 2;
    for (u32 width = 2; width <= size; width *= 2) {
      for (u32 distance = width / 2; distance > 0; distance /= 2) {
        const u32 low = threadIdx.x / distance * 2 * distance + threadIdx.x % distance, high = low + distance;
        if (high < size) {
          const u64 a = shared_.candidates[low], b = shared_.candidates[high];
          if ((a < b) == ((low & width) == 0)) shared_.candidates[low] = b, shared_.candidates[high] = a;
        }
        __syncthreads();
      }
    }
  }

  // The largest key with enough tokens at or above it.
  __device__ Cut search(u64 amount, bool by_mass) {
    u64 key = 0;
    for (u64 bit = 1ull << 63; bit > 0; bit >>= 1) {
      if (amount_from(key | bit, by_mass) >= amount) key |= bit;
    }
    return {key, amount_from(key, true)};
  }

  __device__ u64 amount_from(u64 key, bool by_mass) const {
    u64 total = 0;
    logits_.each([&](u32 token, float logit) {
      if (order_key(logit, token) >= key) total += by_mass ? mass(logit) : 1;
    });
    return block_total(total);
  }

  const Logits& logits_;
  CutShared& shared_;
  float top_, inverse_temperature_, bins_per_unit_;
};

}  // namespace blink

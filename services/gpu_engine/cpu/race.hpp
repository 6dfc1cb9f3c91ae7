// Choosing a token at random as a race: token i arrives after a time drawn from an exponential distribution of rate
// weight[i], and the first to arrive is chosen, with probability weight[i] / sum(weights). No sum or order of tokens is
// involved, so any number of threads get the same winner.
#pragma once

#include "services/gpu_engine/cpu/philox.hpp"
#include "services/gpu_engine/cpu/simd.hpp"

namespace blink::cpu::BLINK_ISA {

static float largest(const float* x, int count) {
  float best = kMinusInfinity;
  int i = 0;
  if (count >= kLanes) {
    Lanes lanes = load(x);
    for (i = kLanes; i + kLanes <= count; i += kLanes) lanes = larger(load(x + i), lanes);
    best = largest_of(lanes);
  }
  for (; i < count; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

static void weigh_logits(const float* logits, int count, float top, float inverse_temperature, float* weights) {
  for (int i = 0; i < count; i += kLanes) {
    float in[kLanes], out[kLanes];
    const int n = count - i < kLanes ? count - i : kLanes;
    for (int j = 0; j < kLanes; ++j) in[j] = j < n ? (logits[i + j] - top) * inverse_temperature : kMinusInfinity;
    store(out, exponential(load(in)));
    for (int j = 0; j < n; ++j) weights[i + j] = in[j] > -80.0f ? out[j] : 0.0f;
  }
}

// Sixteen Philox blocks side by side: words of tokens first to first + 63, in order.
BLINK_INLINE void draw(uint64_t seed, uint32_t position, uint32_t first, uint32_t (&words)[4 * kLanes]) {
  uint32_t a[kLanes], b[kLanes], c[kLanes] = {}, d[kLanes] = {};
  for (int i = 0; i < kLanes; ++i) a[i] = first / 4 + i, b[i] = position;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p0 = static_cast<uint64_t>(kPhiloxMultiplier0) * a[i];
      const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c[i];
      a[i] = static_cast<uint32_t>(p1 >> 32) ^ b[i] ^ k0;
      b[i] = static_cast<uint32_t>(p1);
      c[i] = static_cast<uint32_t>(p0 >> 32) ^ d[i] ^ k1;
      d[i] = static_cast<uint32_t>(p0);
    }
  }
  for (int i = 0; i < kLanes; ++i)
    words[4 * i] = a[i], words[4 * i + 1] = b[i], words[4 * i + 2] = c[i], words[4 * i + 3] = d[i];
}

static int race(const float* weights, int count, uint64_t seed, uint32_t position, double (*arrival)(uint32_t, float)) {
  int winner = -1;
  double best = __builtin_inf();
  float bound = __builtin_inff();
  for (int first = 0; first < count; first += 4 * kLanes) {
    uint32_t words[4 * kLanes];
    draw(seed, position, static_cast<uint32_t>(first), words);
    const int n = count - first < 4 * kLanes ? count - first : 4 * kLanes;
    // An arrival is later than uniform / weight, so most tokens are out without a logarithm. The bound is a little
    // above the best, to be safe from rounding.
    bool hopeful[4 * kLanes];
    bool any = false;
    for (int i = 0; i < n; ++i) {
      const float w = weights[first + i];
      hopeful[i] = w > 0 && static_cast<float>(words[i] >> 8) * 0x1p-24f < bound * w;
      any |= hopeful[i];
    }
    if (!any) continue;
    for (int i = 0; i < n; ++i) {
      if (!hopeful[i]) continue;
      const double time = arrival(words[i], weights[first + i]);
      if (time < best) {
        best = time;
        bound = static_cast<float>(best) * 1.0001f;
        winner = first + i;
      }
    }
  }
  return winner;
}

}  // namespace blink::cpu::BLINK_ISA

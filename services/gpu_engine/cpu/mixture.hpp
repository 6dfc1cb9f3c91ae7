// Mixture of experts: the choice of a token's experts, and the sum of their results.
//
// Both depend on the token alone, and sum in one order: the largest weight first.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace blink::cpu {

// The `chosen` largest of `count` logits in descending order, ties to the lower index, and their softmax over all
// experts; over the chosen ones if `normalized`.
inline void choose_experts(const float* logits, int count, int chosen, bool normalized, int32_t* experts,
                           float* weights) {
  for (int k = 0; k < chosen; ++k) {
    int best = -1;
    for (int e = 0; e < count; ++e) {
      const bool behind =
          k == 0 || logits[e] < logits[experts[k - 1]] || (logits[e] == logits[experts[k - 1]] && e > experts[k - 1]);
      if (behind && (best < 0 || logits[e] > logits[best])) best = e;
    }
    experts[k] = best < 0 ? 0 : best;  // fewer than `chosen` comparable logits: NaN, which no choice can mend
    weights[k] = std::exp(logits[experts[k]] - logits[experts[0]]);
  }
  float total = 0.0f;
  if (normalized) {
    for (int k = 0; k < chosen; ++k) total += weights[k];
  } else {
    for (int e = 0; e < count; ++e) total += std::exp(logits[e] - logits[experts[0]]);
  }
  for (int k = 0; k < chosen; ++k) weights[k] /= total;
}

// out += sum of weights[k] * rows[places[k]], each `width` floats.
inline void add_weighted(const float* rows, const int32_t* places, const float* weights, int chosen, int width,
                         float* out) {
  for (int k = 0; k < chosen; ++k) {
    const float* row = rows + static_cast<size_t>(places[k]) * width;
    for (int i = 0; i < width; ++i) out[i] += weights[k] * row[i];
  }
}

}  // namespace blink::cpu

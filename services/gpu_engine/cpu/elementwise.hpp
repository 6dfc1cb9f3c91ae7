// The small operations between matrix products.
#pragma once

#include "services/gpu_engine/cpu/simd.hpp"

namespace blink::cpu::BLINK_ISA {

static void rms_norm(const float* in, const float* weight, float epsilon, int width, float* out) {
  Lanes squares = splat(0);
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Lanes x = load(in + i);
    squares = multiply_add(x, x, squares);
  }
  float sum = sum_of(squares);
  for (int j = i; j < width; ++j) sum += in[j] * in[j];
  const float inverse = 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + epsilon);
  const Lanes factor = splat(inverse);
  for (i = 0; i + kLanes <= width; i += kLanes)
    store(out + i, multiply(multiply(load(in + i), factor), load(weight + i)));
  for (; i < width; ++i) out[i] = in[i] * inverse * weight[i];
}

BLINK_INLINE Lanes gated(const Lanes& gate, const Lanes& up) {
  Lanes negative;
  for (int p = 0; p < kParts; ++p) negative.part[p] = -gate.part[p];
  const Lanes e = exponential(negative);
  Lanes result;
  for (int p = 0; p < kParts; ++p) result.part[p] = gate.part[p] / (1.0f + e.part[p]) * up.part[p];
  return result;
}

static void swiglu(const float* gate, const float* up, int width, float* out) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, gated(load(gate + i), load(up + i)));
  if (i == width) return;
  float g[kLanes] = {}, u[kLanes] = {}, o[kLanes];
  for (int j = i; j < width; ++j) g[j - i] = gate[j], u[j - i] = up[j];
  store(o, gated(load(g), load(u)));
  for (int j = i; j < width; ++j) out[j] = o[j - i];
}

static void rotate(float* heads, int count, int head_dim, int half, const float* cosines, const float* sines) {
  for (int h = 0; h < count; ++h, heads += head_dim)
    for (int i = 0; i < half; ++i) {
      const float a = heads[i], b = heads[i + half];
      heads[i] = a * cosines[i] - b * sines[i];
      heads[i + half] = b * cosines[i] + a * sines[i];
    }
}

}  // namespace blink::cpu::BLINK_ISA

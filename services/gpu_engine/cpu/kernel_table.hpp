// The vectorized kernels of one instruction set, and the choice between them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "services/gpu_engine/cpu/weights.hpp"

namespace blink::cpu {

constexpr int kMaxExpandedPanels = 4;  // panels that are dequantized together when many rows share them

// Activations of some rows: value [input][row], rows padded to tile_height(rows), inputs to whole blocks, with zeros.
struct ActivationTile {
  const float* values;
  int rows;
};

// Output [row, first_output + i] of a row-major matrix, `stride` floats between rows.
struct OutputTile {
  float* values;
  size_t stride;
  bool accumulate;  // add to what is there, after the whole product is summed
};

// One layer's KV cache, in pages of `page_size` positions:
//   keys   [pages, kv_heads, head_dim, page_size]   so that scores of neighbouring positions are neighbouring lanes
//   values [pages, kv_heads, page_size, head_dim]
struct KvCache {
  float* keys;
  float* values;
  int kv_heads;
  int head_dim;
  int page_size;

  size_t head_floats() const { return static_cast<size_t>(head_dim) * page_size; }
  size_t offset(int page, int kv_head) const {
    return (static_cast<size_t>(page) * kv_heads + kv_head) * head_floats();
  }
};

struct KernelTable {
  const char* name;

  int tallest_tile;  // rows of activations that one pass over a panel can multiply

  // Rows that a tile of `rows` has once padded.
  int (*tile_height)(int rows);

  // rows of `input` ([rows, inputs], `stride` floats apart) into a tile.
  void (*pack_activations)(const float* input, size_t stride, int rows, int inputs, float* tile);

  // out[row, kPanelOutputs * panel + lane] for `panels` consecutive panels from `first`.
  void (*multiply_panels)(const Weight& weight, int first, int panels, ActivationTile in, OutputTile out);

  // Panels as BlockF32: exactly the values that multiply_panels uses.
  void (*expand_panels)(const Weight& weight, int first, int panels, float* expanded);

  // out = in / sqrt(mean(in^2) + epsilon) * weight; `out` may be `in`.
  void (*rms_norm)(const float* in, const float* weight, float epsilon, int width, float* out);

  // out = silu(gate) * up
  void (*swiglu)(const float* gate, const float* up, int width, float* out);

  // Rotates the pairs (i, i + half) of each head in place; what lies beyond them stays.
  void (*rotate)(float* heads, int count, int head_dim, int half, const float* cosines, const float* sines);

  // Softmax attention of `heads` query heads that share one KV head over positions [0, length).
  // scratch: heads * (length rounded up to whole pages) floats. queries and out: [heads, head_dim].
  void (*attend)(const KvCache& cache, const int32_t* pages, int length, int kv_head, const float* queries, int heads,
                 float* scratch, float* out);

  float (*largest)(const float* x, int count);

  // weights = exp((logits - top) * inverse_temperature), 0 where the exponent is below -80
  void (*weigh_logits)(const float* logits, int count, float top, float inverse_temperature, float* weights);

  // The token that arrives first (race.hpp), -1 when every weight is 0.
  int (*race)(const float* weights, int count, uint64_t seed, uint32_t position, double (*arrival)(uint32_t, float));
};

// The best set that this CPU runs, or the one named by `name`; null when the CPU lacks it.
const KernelTable* kernel_table(const char* name = nullptr);

}  // namespace blink::cpu

// Panel products: see weights.hpp for the layout and for why results don't depend on the batch.
//
// A tile of P vectors of outputs by R rows keeps P * R accumulators in registers. Each weight is dequantized in
// registers once for R rows: shift, table look-up (or conversion) and one multiply-add for sixteen values.
#pragma once

#include "services/gpu_engine/cpu/kernel_table.hpp"
#include "services/gpu_engine/cpu/simd.hpp"

namespace blink::cpu::BLINK_ISA {

// The four low bits of each word as a number, less `offset`.
template <int offset>
BLINK_INLINE Vector low_nibbles(Words words) {
#if defined(__AVX512F__)
  constexpr float o = offset;
  const Vector table = {0 - o, 1 - o, 2 - o,  3 - o,  4 - o,  5 - o,  6 - o,  7 - o,
                        8 - o, 9 - o, 10 - o, 11 - o, 12 - o, 13 - o, 14 - o, 15 - o};
  return (Vector)_mm512_permutexvar_ps((__m512i)words, (__m512)table);
#else
  return __builtin_convertvector((Integers)(words & 15u) - offset, Vector);
#endif
}

template <int offset>
BLINK_INLINE Lanes nibbles(const uint32_t* quants, int k) {
  Lanes lanes;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) lanes.part[p] = low_nibbles<offset>(load_words(quants + p * kWidth) >> (4 * k));
  return lanes;
}

// Each reader delivers the values of input eighth + k of a block for sixteen outputs from `lane` on; k is a constant
// after unrolling.
#define BLINK_READ_PLAIN(name, BlockType, convert)                                  \
  struct name {                                                                     \
    using Block = BlockType;                                                        \
    const Block* block;                                                             \
    int lane;                                                                       \
    BLINK_INLINE name open(const Block& block, int lane) { return {&block, lane}; } \
    __attribute__((always_inline)) Lanes value(int eighth, int k) const {           \
      return convert(&block->value[eighth + k][lane]);                              \
    }                                                                               \
  };
BLINK_READ_PLAIN(ReadF32, BlockF32, load)
BLINK_READ_PLAIN(ReadF16, BlockF16, load_half)
BLINK_READ_PLAIN(ReadBF16, BlockBF16, load_brain)

struct ReadQ4_0 {
  using Block = BlockQ4_0;
  const Block* block;
  int lane;
  Lanes scale;
  BLINK_INLINE ReadQ4_0 open(const Block& block, int lane) { return {&block, lane, load_half(&block.scale[lane])}; }
  __attribute__((always_inline)) Lanes value(int eighth, int k) const {
    return multiply(nibbles<8>(&block->quants[eighth / 8][lane], k), scale);
  }
};

struct ReadQ4_1 {
  using Block = BlockQ4_1;
  const Block* block;
  int lane;
  Lanes scale, minimum;
  BLINK_INLINE ReadQ4_1 open(const Block& block, int lane) {
    return {&block, lane, load_half(&block.scale[lane]), load_half(&block.minimum[lane])};
  }
  __attribute__((always_inline)) Lanes value(int eighth, int k) const {
    return multiply_add(nibbles<0>(&block->quants[eighth / 8][lane], k), scale, minimum);
  }
};

struct ReadQ8_0 {
  using Block = BlockQ8_0;
  const Block* block;
  int lane;
  Lanes scale;
  BLINK_INLINE ReadQ8_0 open(const Block& block, int lane) { return {&block, lane, load_half(&block.scale[lane])}; }
  __attribute__((always_inline)) Lanes value(int eighth, int k) const {
    return multiply(load_bytes(&block->quant[eighth + k][lane]), scale);
  }
};

struct ReadF8 {
  using Block = BlockF8;
  const Block* block;
  int lane;
  Lanes scale;  // times 256, a power of two: the product is rounded once, as without it
  BLINK_INLINE ReadF8 open(const Block& block, int lane) {
    return {&block, lane, multiply(load(&block.scale[lane]), splat(256.0f))};
  }
  __attribute__((always_inline)) Lanes value(int eighth, int k) const {
    return multiply(load_e4m3_over_256(&block->value[eighth + k][lane]), scale);
  }
};

// Memory is asked for this much ahead: the hardware's own prefetching stops at each 4 KiB page.
constexpr int kPrefetchBytes = 2048;

template <class Block>
BLINK_INLINE void prefetch(const Block& block) {
  const char* ahead = reinterpret_cast<const char*>(&block) + kPrefetchBytes;
#pragma GCC unroll 64
  for (size_t i = 0; i < sizeof(Block); i += 64) __builtin_prefetch(ahead + i);
}

BLINK_INLINE void store_outputs(float* to, const Lanes& sum, int outputs, bool accumulate) {
  if (outputs >= kLanes) {
    const Lanes before = accumulate ? load(to) : splat(0);
    Lanes result = sum;
    if (accumulate)
      for (int p = 0; p < kParts; ++p) result.part[p] = before.part[p] + sum.part[p];
    store(to, result);
    return;
  }
  float values[kLanes];
  store(values, sum);
  for (int i = 0; i < outputs; ++i) to[i] = accumulate ? to[i] + values[i] : values[i];
}

// P vectors of outputs of one panel, from `lane` on, for R rows.
template <class Read, int P, int R>
static void multiply_tile(const typename Read::Block* panel, int blocks, int lane, ActivationTile in, float* out,
                          size_t stride, int outputs, bool accumulate) {
  Lanes sum[P][R];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[p][r] = splat(0);
  const float* x = in.values;
  for (int b = 0; b < blocks; ++b) {
    prefetch(panel[b]);
    Read read[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) read[p] = Read::open(panel[b], lane + p * kLanes);
    for (int eighth = 0; eighth < kBlockInputs; eighth += 8, x += 8 * R) {
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        Lanes w[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) w[p] = read[p].value(eighth, k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Lanes activation = splat(x[k * R + r]);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) sum[p][r] = multiply_add(w[p], activation, sum[p][r]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      if (r < in.rows)
        store_outputs(out + r * stride + lane + p * kLanes, sum[p][r], outputs - lane - p * kLanes, accumulate);
}

template <class Read, int R>
static void multiply_rows(const Weight& weight, int first, int panels, ActivationTile in, const OutputTile& out) {
  // As many accumulators as hide the latency of multiply-adds, no more than there are registers.
  constexpr int P = kParts == 1 || R == 1 ? kPanelOutputs / kLanes : 1;
  for (int panel = first; panel < first + panels; ++panel) {
    const auto* blocks = reinterpret_cast<const typename Read::Block*>(weight.panel(panel));
    for (int lane = 0; lane < kPanelOutputs; lane += P * kLanes)
      multiply_tile<Read, P, R>(blocks, weight.blocks(), lane, in, out.values + panel * kPanelOutputs, out.stride,
                                weight.outputs - panel * kPanelOutputs, out.accumulate);
  }
}

// Tile heights that are compiled; a tile of any other height is padded with rows of zeros to the next.
#if defined(__AVX512F__)
constexpr int kTallestTile = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTallestTile = 6;
#else
constexpr int kTallestTile = 2;
#endif

static int tile_height(int rows) {
  const int heights[] = {1, 2, 4, 6, 8, 12};
  for (int height : heights)
    if (height >= rows || height == kTallestTile) return height;
  return 0;
}

template <class Read, int R = kTallestTile>
static void multiply_read(const Weight& weight, int first, int panels, ActivationTile in, OutputTile out) {
  if (tile_height(in.rows) == R) return multiply_rows<Read, R>(weight, first, panels, in, out);
  if constexpr (R > 1) return multiply_read<Read, (R > 8 ? 8 : R > 2 ? R - 2 : 1)>(weight, first, panels, in, out);
}

static void multiply_panels(const Weight& weight, int first, int panels, ActivationTile in, OutputTile out) {
  switch (weight.type) {
      // clang-format off
    case WeightType::kF32: return multiply_read<ReadF32>(weight, first, panels, in, out);
    case WeightType::kF16: return multiply_read<ReadF16>(weight, first, panels, in, out);
    case WeightType::kBF16: return multiply_read<ReadBF16>(weight, first, panels, in, out);
    case WeightType::kQ4_0: return multiply_read<ReadQ4_0>(weight, first, panels, in, out);
    case WeightType::kQ4_1: return multiply_read<ReadQ4_1>(weight, first, panels, in, out);
    case WeightType::kQ8_0: return multiply_read<ReadQ8_0>(weight, first, panels, in, out);
    case WeightType::kF8: return multiply_read<ReadF8>(weight, first, panels, in, out);
      // clang-format on
  }
}

template <class Read>
static void expand_read(const Weight& weight, int first, int panels, float* expanded) {
  for (int panel = first; panel < first + panels; ++panel) {
    const auto* blocks = reinterpret_cast<const typename Read::Block*>(weight.panel(panel));
    for (int b = 0; b < weight.blocks(); ++b, expanded += kBlockInputs * kPanelOutputs) {
      for (int lane = 0; lane < kPanelOutputs; lane += kLanes) {
        const Read read = Read::open(blocks[b], lane);
        for (int eighth = 0; eighth < kBlockInputs; eighth += 8)
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) store(expanded + (eighth + k) * kPanelOutputs + lane, read.value(eighth, k));
      }
    }
  }
}

static void expand_panels(const Weight& weight, int first, int panels, float* expanded) {
  switch (weight.type) {
      // clang-format off
    case WeightType::kF32: return expand_read<ReadF32>(weight, first, panels, expanded);
    case WeightType::kF16: return expand_read<ReadF16>(weight, first, panels, expanded);
    case WeightType::kBF16: return expand_read<ReadBF16>(weight, first, panels, expanded);
    case WeightType::kQ4_0: return expand_read<ReadQ4_0>(weight, first, panels, expanded);
    case WeightType::kQ4_1: return expand_read<ReadQ4_1>(weight, first, panels, expanded);
    case WeightType::kQ8_0: return expand_read<ReadQ8_0>(weight, first, panels, expanded);
    case WeightType::kF8: return expand_read<ReadF8>(weight, first, panels, expanded);
      // clang-format on
  }
}

static void pack_activations(const float* input, size_t stride, int rows, int inputs, float* tile) {
  const int padded = (inputs + kBlockInputs - 1) / kBlockInputs * kBlockInputs;
  const int height = tile_height(rows);
  for (int k = 0; k < padded; ++k)
    for (int r = 0; r < height; ++r) *tile++ = k < inputs && r < rows ? input[r * stride + k] : 0.0f;
}

}  // namespace blink::cpu::BLINK_ISA

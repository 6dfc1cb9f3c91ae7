// How weights lie in memory: panels of 32 outputs, cut along the inputs into blocks of 32.
//
// Each lane of a vector belongs to one output, so a product needs no sum across lanes, and each output is one chain of
// multiply-adds in ascending input order whatever the batch: the same bits alone and in any batch. A panel is read from
// its first byte to its last, which is what memory does best. A block takes exactly the bytes of the 32 GGUF blocks
// that it is made of, and holds exactly their values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blink::cpu {

constexpr int kPanelOutputs = 32;
constexpr int kBlockInputs = 32;

enum class WeightType : int { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ8_0, kF8 };

struct BlockF32 {
  float value[kBlockInputs][kPanelOutputs];
};

struct BlockF16 {
  uint16_t value[kBlockInputs][kPanelOutputs];
};

struct BlockBF16 {
  uint16_t value[kBlockInputs][kPanelOutputs];
};

// Word [j][i] holds inputs 8j to 8j + 7 of output i, the first in the lowest four bits. value = scale * (quant - 8)
struct BlockQ4_0 {
  uint16_t scale[kPanelOutputs];
  uint32_t quants[4][kPanelOutputs];
};

// value = scale * quant + minimum
struct BlockQ4_1 {
  uint16_t scale[kPanelOutputs];
  uint16_t minimum[kPanelOutputs];
  uint32_t quants[4][kPanelOutputs];
};

// value = scale * quant
struct BlockQ8_0 {
  uint16_t scale[kPanelOutputs];
  int8_t quant[kBlockInputs][kPanelOutputs];
};

// value = scale * e4m3 (float8.hpp)
struct BlockF8 {
  float scale[kPanelOutputs];
  uint8_t value[kBlockInputs][kPanelOutputs];
};

constexpr size_t block_bytes(WeightType type) {
  switch (type) {
    case WeightType::kF32:
      return sizeof(BlockF32);
    case WeightType::kF16:
      return sizeof(BlockF16);
    case WeightType::kBF16:
      return sizeof(BlockBF16);
    case WeightType::kQ4_0:
      return sizeof(BlockQ4_0);
    case WeightType::kQ4_1:
      return sizeof(BlockQ4_1);
    case WeightType::kQ8_0:
      return sizeof(BlockQ8_0);
    case WeightType::kF8:
      return sizeof(BlockF8);
  }
  return 0;
}

// A packed matrix: panels of `blocks` blocks each. Outputs and inputs beyond the matrix are zero.
struct Weight {
  WeightType type;
  int outputs;
  int inputs;
  const uint8_t* data;

  int panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
  int blocks() const { return (inputs + kBlockInputs - 1) / kBlockInputs; }
  size_t panel_bytes() const { return blocks() * block_bytes(type); }
  const uint8_t* panel(int index) const { return data + index * panel_bytes(); }
};

// Copies rows as a checkpoint stores them (GGUF blocks or plain numbers, `row_bytes` apart) into zeroed panels. FP8
// rows have `scales` [outputs, blocks] beside them, other types none.
void pack(const Weight& weight, const uint8_t* rows, size_t row_bytes, const float* scales, uint8_t* panels);

}  // namespace blink::cpu

#include <cstring>

#include "services/gpu_engine/cpu/weights.hpp"

namespace blink::cpu {
namespace {

// GGUF's 4-bit blocks keep inputs 0 to 15 in the low halves of 16 bytes, 16 to 31 in the high halves.
uint32_t nibble(const uint8_t* quants, int input) {
  return input < 16 ? quants[input] & 15u : static_cast<uint32_t>(quants[input - 16] >> 4);
}

template <class Block>
void pack_nibbles(Block& block, int lane, const uint8_t* quants) {
  for (int input = 0; input < kBlockInputs; ++input)
    block.quants[input / 8][lane] |= nibble(quants, input) << (4 * (input % 8));
}

void pack_block(BlockQ4_0& block, int lane, const uint8_t* stored, int) {
  std::memcpy(&block.scale[lane], stored, 2);
  pack_nibbles(block, lane, stored + 2);
}

void pack_block(BlockQ4_1& block, int lane, const uint8_t* stored, int) {
  std::memcpy(&block.scale[lane], stored, 2);
  std::memcpy(&block.minimum[lane], stored + 2, 2);
  pack_nibbles(block, lane, stored + 4);
}

void pack_block(BlockQ8_0& block, int lane, const uint8_t* stored, int) {
  std::memcpy(&block.scale[lane], stored, 2);
  for (int input = 0; input < kBlockInputs; ++input) block.quant[input][lane] = static_cast<int8_t>(stored[2 + input]);
}

void pack_block(BlockF8& block, int lane, const uint8_t* stored, int inputs) {
  for (int input = 0; input < inputs; ++input) block.value[input][lane] = stored[input];
}

template <class Block>
void pack_block(Block& block, int lane, const uint8_t* stored, int inputs) {
  constexpr size_t size = sizeof block.value[0][0];
  for (int input = 0; input < inputs; ++input) std::memcpy(&block.value[input][lane], stored + input * size, size);
}

template <class Block>
void pack_all(const Weight& weight, size_t stored_block, const uint8_t* rows, size_t row_bytes, uint8_t* panels) {
  for (int output = 0; output < weight.outputs; ++output) {
    auto* blocks = reinterpret_cast<Block*>(panels + output / kPanelOutputs * weight.panel_bytes());
    const uint8_t* row = rows + output * row_bytes;
    for (int b = 0; b < weight.blocks(); ++b) {
      const int left = weight.inputs - b * kBlockInputs;
      pack_block(blocks[b], output % kPanelOutputs, row + b * stored_block, left < kBlockInputs ? left : kBlockInputs);
    }
  }
}

void pack_scales(const Weight& weight, const float* scales, uint8_t* panels) {
  for (int output = 0; output < weight.outputs; ++output) {
    auto* blocks = reinterpret_cast<BlockF8*>(panels + output / kPanelOutputs * weight.panel_bytes());
    for (int b = 0; b < weight.blocks(); ++b) blocks[b].scale[output % kPanelOutputs] = *scales++;
  }
}

}  // namespace

void pack(const Weight& weight, const uint8_t* rows, size_t row_bytes, const float* scales, uint8_t* panels) {
  switch (weight.type) {
    case WeightType::kF32:
      return pack_all<BlockF32>(weight, 4 * kBlockInputs, rows, row_bytes, panels);
    case WeightType::kF16:
      return pack_all<BlockF16>(weight, 2 * kBlockInputs, rows, row_bytes, panels);
    case WeightType::kBF16:
      return pack_all<BlockBF16>(weight, 2 * kBlockInputs, rows, row_bytes, panels);
    case WeightType::kQ4_0:
      return pack_all<BlockQ4_0>(weight, 18, rows, row_bytes, panels);
    case WeightType::kQ4_1:
      return pack_all<BlockQ4_1>(weight, 20, rows, row_bytes, panels);
    case WeightType::kQ8_0:
      return pack_all<BlockQ8_0>(weight, 34, rows, row_bytes, panels);
    case WeightType::kF8:
      pack_scales(weight, scales, panels);
      return pack_all<BlockF8>(weight, kBlockInputs, rows, row_bytes, panels);
  }
}

}  // namespace blink::cpu

// The kernels of FP8 weights on the host: all codes, and skinny products in every build and several shapes, with copies
// that land at once and late, against the bits of the bf16 kernel over the dequantized weights, and against float64.
// Exits with 1, saying what is wrong.
#include <cstdio>
#include <random>

#include "device.hpp"

// Kernels, which need what is above.
#include "dequantize_fp8.cu"
#include "skinny_endings.cuh"
#include "skinny_fp8.cuh"
#include "skinny_gemm.cuh"

using namespace blink;

namespace {

using Values = std::vector<bf16>;

double worth(u32 code) {
  const u32 exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude =
      exponent ? std::ldexp(8 + mantissa, static_cast<int>(exponent) - 10) : std::ldexp(mantissa, -9);
  return code >> 7 ? -magnitude : magnitude;
}

void check_codes() {
  for (const float scale : {1.0f, 0.0123f, 3.7f, 1e-6f}) {
    for (u32 code = 0; code < 256; ++code) {
      const u32 other = 255 - code, pair = dequantize(static_cast<u16>(code | other << 8), scale);
      for (const auto& [each, got] : {std::pair{code, low_half(pair)}, std::pair{other, high_half(pair)}}) {
        const float exact = static_cast<float>(worth(each));
        const float expected = to_float(to_bf16(exact * scale));
        if (std::isnan(exact) ? !std::isnan(got) : bits_as<u32>(got) != bits_as<u32>(expected)) fail("a code");
        if (scale == 1 && !std::isnan(exact) && got != exact) fail("a code is not exact");
      }
    }
  }
}

struct Matrix {
  u32 rows, columns;
  std::vector<u8> codes;
  std::vector<float> scales;
  Values dequantized;
  Fp8Matrix view;

  Matrix(u32 rows, u32 columns, bool blocks, std::mt19937& random) : rows(rows), columns(columns) {
    const u32 count = blocks ? (columns + kScaleColumns - 1) / kScaleColumns : 1;
    std::uniform_real_distribution<float> scale(0.001f, 0.01f);
    codes.resize(rows * columns), scales.resize(rows * count), dequantized.resize(rows * columns, {0x7FC0});
    for (u8& code : codes) do
        code = static_cast<u8>(random());
      while ((code & 0x7F) == 0x7F);
    for (float& each : scales) each = scale(random);
    view = {codes.data(), scales.data(), blocks ? rows : 0};
    launch({(columns + 4095) / 4096, rows, 1}, 256, [&] { dequantize_fp8(view, rows, columns, dequantized.data()); });
    for (u32 i = 0; i < rows * columns; ++i) {
      const u32 row = i / columns, block = blocks ? i % columns / kScaleColumns : 0;
      const float exact = static_cast<float>(worth(codes[i])) * scales[block * rows + row];
      if (dequantized[i].bits != to_bf16(exact).bits) fail("dequantized otherwise");
    }
  }
};

// W [weight rows, columns] as skinny_gemm.py and fp8_products.py describe it, `bytes` of a row's `columns`.
TensorMap weight_map(const void* base, u64 columns, u64 bytes, u64 outputs, u32 rows, bool gated) {
  if (!gated) return map_of(base, {columns, outputs}, {bytes}, {64, rows});
  return map_of(base, {columns, 8, 2, outputs / 8}, {bytes, outputs * bytes, 8 * bytes}, {64, 8, 2, rows / 16});
}

template <bool kGated>
Values product(const Matrix& weight, const Values& x, u32 tokens, u32 rows, u32 run, bool fp8) {
  const u32 outputs = kGated ? weight.rows / 2 : weight.rows, columns = weight.columns;
  const u32 depth = fp8 ? kFp8Depth : kDepth, stage = rows * kRowBytes + (fp8 ? 2 : 1) * kTokens * kRowBytes;
  const Problem problem = {
      tokens, outputs, rows, run, (columns + depth - 1) / depth, std::min(5u, (200u << 10) / stage)};
  const TensorMap x_map = map_of(x.data(), {columns, tokens}, {2 * columns}, {64, kTokens});
  const TensorMap codes = weight_map(weight.codes.data(), columns / 2, columns, outputs, rows, kGated);
  const TensorMap plain = weight_map(weight.dequantized.data(), columns, 2 * columns, outputs, rows, kGated);
  Values out(outputs * (tokens + 1), bf16{0xFFFF});
  using Ending = std::conditional_t<kGated, Swiglu, Store<>>;
  using Layout = std::conditional_t<kGated, Gated, Plain>;
  using Fp8Layout = std::conditional_t<kGated, Fp8Gated, Fp8Plain>;
  const u32 tiles = (weight.rows + rows - 1) / rows;
  std::memset(dynamic_memory, 0xFF, sizeof dynamic_memory);
  launch({(tiles + run - 1) / run, 1, 1}, kThreads, [&] {
    if (fp8)
      skinny_fp8<Fp8Layout>(dynamic_memory, codes, x_map, weight.view, problem, Ending{out.data()});
    else
      skinny_gemm<Layout>(dynamic_memory, plain, x_map, problem, Ending{out.data()});
  });
  for (u32 i = outputs * tokens; i < out.size(); ++i)
    if (out[i].bits != 0xFFFF) fail("rows beyond the product were written");
  out.resize(outputs * tokens);
  return out;
}

double error(const Matrix& weight, const Values& x, const Values& out, u32 tokens) {
  double wrong = 0, all = 0;
  for (u32 t = 0; t < tokens; ++t)
    for (u32 n = 0; n < weight.rows; ++n) {
      double sum = 0;
      for (u32 k = 0; k < weight.columns; ++k)
        sum += static_cast<double>(to_float(x[t * weight.columns + k])) *
               to_float(weight.dequantized[n * weight.columns + k]);
      const double difference = to_float(out[t * weight.rows + n]) - sum;
      wrong += difference * difference, all += sum * sum;
    }
  return std::sqrt(wrong / all);
}

template <bool kGated>
void check(u32 rows_of_weight, u32 columns, bool blocks, u32 rows, u32 run, u32 tokens) {
  std::mt19937 random(rows_of_weight + columns + rows);
  std::normal_distribution<float> normal;
  const Matrix weight(rows_of_weight, columns, blocks, random);
  Values x(tokens * columns);
  for (bf16& value : x) value = to_bf16(normal(random) * 0.02f);
  const Values expected = product<kGated>(weight, x, tokens, rows, run, false);
  if (!kGated && !(error(weight, x, expected, tokens) < 4e-3)) fail("not the product of the dequantized weights");
  for (const bool late : {false, true}) {
    late_boxes = late;
    const Values got = product<kGated>(weight, x, tokens, rows, run, true);
    if (std::memcmp(got.data(), expected.data(), got.size() * sizeof(bf16)) != 0) fail("other bits than bf16's");
  }
  late_boxes = false;
}

}  // namespace

int main() {
  check_codes();
  for (const bool blocks : {false, true}) {
    check<false>(48, 320, blocks, 16, 3, kTokens);         // a tile of one warp, columns that end inside a stage
    check<false>(200, 256, blocks, 80, 1, kTokens - 3);    // outputs that end inside a tile, two warpgroups
    check<false>(256, 1040, blocks, 128, 2, 1);            // an odd number of stages, more than the ring has
    check<true>(2 * 72, 208, blocks, 32, 1, kTokens - 1);  // gate and up
    check<true>(2 * 104, 384, blocks, 112, 2, kTokens);
  }
}

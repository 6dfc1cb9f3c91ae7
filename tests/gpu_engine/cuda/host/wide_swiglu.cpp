// A wide product with SwiGLU on the host, with copies that land at once and late: its bits against a plain loop in the
// engine's order of summation, which float64 checks, and the formula. Arguments: tokens, outputs, depth, clusters, then
// the plan (wide_schedule.py): pairs along tokens and rows, and whether a pair has the same rows. Exits with 1, saying
// what is wrong.
#include <cstdio>
#include <random>

#include "device.hpp"

// The kernel, which needs what is above.
#include "wide_swiglu.cuh"

using namespace blink;

namespace {

using Values = std::vector<bf16>;

struct Case {
  u32 tokens, outputs, depth, clusters;
  WideProblem problem;
};

Values random_values(u64 count, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Values values(count);
  for (bf16& value : values) value = to_bf16(normal(random) * scale);
  return values;
}

float ordered_sum(const bf16* x, const bf16* weight, u32 depth) {
  float sum = 0;
  double exact = 0, size = 0;
  for (u32 first = 0; first < depth; first += 16) {
    float sixteen = 0;
    for (u32 k = first; k < min(first + 16, depth); ++k) {
      const float factor = to_float(x[k]), other = to_float(weight[k]);
      sixteen += factor * other;
      exact += static_cast<double>(factor) * other, size += std::abs(static_cast<double>(factor) * other);
    }
    sum += sixteen;
  }
  if (!(std::abs(sum - exact) <= 1e-5 * size)) fail("the loop is not the product of float64");
  return sum;
}

// A factor as the ending has it.
float factor_of(const bf16* x, const bf16* weight, u32 depth) {
  return to_float(to_bf16(ordered_sum(x, weight, depth)));
}

Values expected(const Case& c, const Values& x, const Values& weight) {
  Values out(c.tokens * c.outputs);
  for (u32 t = 0; t < c.tokens; ++t) {
    for (u32 n = 0; n < c.outputs; ++n) {
      const auto factor = [&](u32 row) { return factor_of(&x[t * c.depth], &weight[row * c.depth], c.depth); };
      out[t * c.outputs + n] = to_bf16(gated(factor(n), factor(c.outputs + n)));
    }
  }
  return out;
}

Values computed(const Case& c, const Values& x, const Values& weight) {
  const u64 bytes = 2 * c.depth;
  const TensorMap x_map = map_of(x.data(), {c.depth, c.tokens}, {bytes}, {kDepth, kTileTokens / 2});
  const TensorMap weight_map = map_of(weight.data(), {c.depth, 8, 2, c.outputs / 8},
                                      {bytes, c.outputs * bytes, 8 * bytes}, {kDepth, 8, 2, kTileRows / 2 / 16});
  const bf16 poison = {0xFFFF};
  Values out(c.outputs * (c.tokens + 1), poison);
  std::memset(dynamic_memory, 0xFF, sizeof dynamic_memory);
  launch_clusters(c.clusters, kClusterBlocks, kWideThreads,
                  [&] { multiply_swiglu(block_memory(rank_in_cluster()), weight_map, x_map, c.problem, out.data()); });
  for (u32 i = c.outputs * c.tokens; i < out.size(); ++i)
    if (std::memcmp(&out[i], &poison, sizeof poison) != 0) fail("rows beyond the product were written");
  out.resize(c.outputs * c.tokens);
  return out;
}

}  // namespace

int main(int, char** arguments) {
  const auto number = [&](u32 i) { return static_cast<u32>(std::atoi(arguments[i])); };
  Case c = {number(1), number(2), number(3), number(4), {}};
  c.problem = {c.tokens, c.outputs, (c.depth + kDepth - 1) / kDepth, number(5), number(6), number(7)};
  std::mt19937 random(c.tokens + c.outputs + c.depth);
  const Values x = random_values(c.tokens * c.depth, 1, random);
  const Values weight = random_values(2 * c.outputs * c.depth, 0.1f, random);
  const Values wanted = expected(c, x, weight);
  for (const bool late : {false, true}) {
    late_boxes = late;
    const Values got = computed(c, x, weight);
    if (std::memcmp(got.data(), wanted.data(), got.size() * sizeof(bf16)) != 0) {
      fail(late ? "other bits with late copies" : "other bits");
    }
  }
}

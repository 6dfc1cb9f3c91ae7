// A mixture layer by its own kernels on the host, in every shape, with copies that land at once and as late as they
// may, against float64. Arguments: tokens, and "alike" if all of them shall be the same. Exits with 1, saying what is
// wrong.
#include <cstdio>
#include <random>
#include <set>

#include "device.hpp"
#include "mixture_combine.cu"
#include "mixture_gemm.cu"
#include "mixture_route.cu"

using namespace blink;

namespace {

using Values = std::vector<bf16>;

struct Shape {
  const u32* cut;  // weight rows, item rows, shared memory
  void (*gate_up)(MixtureWork, GemmOperands);
  void (*down)(MixtureWork, GemmOperands);
};
const Shape kShapes[] = {{mixture_thin_shape, mixture_gate_up_thin, mixture_down_thin},
                         {mixture_narrow_shape, mixture_gate_up_narrow, mixture_down_narrow},
                         {mixture_medium_shape, mixture_gate_up_medium, mixture_down_medium},
                         {mixture_wide_shape, mixture_gate_up_wide, mixture_down_wide}};

struct Layer {
  u32 tokens, rows;
  std::mt19937 random{1};
  Values x, router, gate_up, down;
  std::vector<float> logits, weights;
  std::vector<i32> chosen, places, row_token;
  std::vector<MixtureItem> items;
  std::vector<u32> arrivals;
  u32 item_count = 99;

  Layer(u32 tokens, bool alike) : tokens(tokens), rows(tokens * kChosen) {
    x = normal(tokens * kHidden, 1);
    if (alike)
      for (u32 token = 1; token < tokens; ++token) std::copy_n(x.begin(), kHidden, x.begin() + token * kHidden);
    const float scale = 1 / std::sqrt(static_cast<float>(kHidden));
    router = normal(kExperts * kHidden, scale);
    gate_up = normal(kExperts * 2 * kExpertFfn * kHidden, scale);
    down = normal(kExperts * kHidden * kExpertFfn, scale);
    logits.resize(tokens * kExperts), weights.resize(rows), arrivals.resize(1 + (tokens + 15) / 16);
    chosen.resize(rows), places.resize(rows), row_token.resize(rows), items.resize(kExperts + rows);
  }

  Values normal(u32 count, float scale) {
    std::normal_distribution<float> numbers;
    Values values(count);
    for (bf16& value : values) value = to_bf16(numbers(random) * scale);
    return values;
  }

  Values run(const Shape& shape) {
    Values activated(rows * kExpertFfn, bf16{0xFFFF}), results(rows * kHidden, bf16{0xFFFF}), out(tokens * kHidden);
    const MixtureWork work = {logits.data(),    chosen.data(), weights.data(), places.data(),
                              row_token.data(), items.data(),  &item_count,    arrivals.data()};
    const StepCounts counts = {tokens, 1, 1};
    Step step = {};
    step.counts = &counts;
    const u32 most = std::min(kExperts, rows) + rows / shape.cut[1];
    const GemmOperands first = {x.data(), gate_up.data(), activated.data()};
    const GemmOperands second = {activated.data(), down.data(), results.data()};
    launch({(tokens + 20) / 16, kExperts / 16, 1}, 256,
           [&] { mixture_route(step, work, x.data(), router.data(), 1, shape.cut[1]); });
    if (std::any_of(arrivals.begin(), arrivals.end(), [](u32 count) { return count != 0; })) fail("arrivals are left");
    if (item_count > most) fail("there are more items than the grid has");
    launch({2 * kExpertFfn / shape.cut[0], most, 1}, 128, [&] { shape.gate_up(work, first); });
    launch({kHidden / shape.cut[0], most, 1}, 128, [&] { shape.down(work, second); });
    launch({tokens + 3, 1, 1}, 256, [&] { mixture_combine(step, work, results.data(), out.data()); });
    check_norm(step, work, results, out);
    return out;
  }

  // The fused end of a layer against the plain one.
  void check_norm(const Step& step, const MixtureWork& work, const Values& results, const Values& sums) {
    const Values before = normal(sums.size(), 1), weight = normal(kHidden, 1);
    std::vector<float> residual;
    for (bf16 value : before) residual.push_back(to_float(value));
    Values normed(sums.size());
    launch({tokens, 1, 1}, 256, [&] {
      mixture_combine_norm(step, work, results.data(), residual.data(), weight.data(), normed.data(), 1e-5f);
    });
    for (u32 token = 0; token < tokens; ++token) {
      double squares = 0;
      for (u32 i = token * kHidden; i < (token + 1) * kHidden; ++i) {
        const double sum = to_float(sums[i]);
        if (std::fabs(residual[i] - to_float(before[i]) - sum) > 1e-5 + std::fabs(sum) / 200) fail("residual");
        squares += static_cast<double>(residual[i]) * residual[i];
      }
      for (u32 i = 0; i < kHidden; ++i) {
        const double exact = residual[token * kHidden + i] / std::sqrt(squares / kHidden + 1e-5) * to_float(weight[i]);
        if (std::fabs(to_float(normed[token * kHidden + i]) - exact) > 1e-6 + std::fabs(exact) / 200) fail("norm");
      }
    }
  }

  double dot(const Values& a, u32 at_a, const Values& b, u32 at_b, u32 count) const {
    double sum = 0;
    for (u32 i = 0; i < count; ++i) sum += static_cast<double>(to_float(a[at_a + i])) * to_float(b[at_b + i]);
    return sum;
  }

  // Relative error of `out`; routing is compared exactly.
  double error(const Values& out) const {
    double wrong = 0, all = 0;
    std::set<i32> taken;
    for (u32 token = 0; token < tokens; ++token) {
      std::vector<double> exact(kExperts), sum(kHidden), hidden(kExpertFfn);
      std::vector<u32> order(kExperts);
      for (u32 e = 0; e < kExperts; ++e) exact[e] = dot(x, token * kHidden, router, e * kHidden, kHidden), order[e] = e;
      std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return exact[a] > exact[b]; });
      double total = 0;
      for (u32 k = 0; k < kChosen; ++k) total += std::exp(exact[order[k]] - exact[order[0]]);
      for (u32 k = 0; k < kChosen; ++k) {
        const u32 pair = token * kChosen + k, e = order[k];
        const double weight = std::exp(exact[e] - exact[order[0]]) / total;
        if (chosen[pair] != static_cast<i32>(e)) fail("another expert");
        if (std::fabs(weights[pair] - weight) > 1e-5) fail("another weight");
        if (!taken.insert(places[pair]).second || row_token[places[pair]] != static_cast<i32>(token)) fail("a place");
        for (u32 f = 0; f < kExpertFfn; ++f) {
          const u32 row = e * 2 * kExpertFfn + f;
          const double gate = dot(x, token * kHidden, gate_up, row * kHidden, kHidden);
          const double up = dot(x, token * kHidden, gate_up, (row + kExpertFfn) * kHidden, kHidden);
          hidden[f] = gate / (1 + std::exp(-gate)) * up;
        }
        for (u32 i = 0; i < kHidden; ++i) {
          double result = 0;
          for (u32 f = 0; f < kExpertFfn; ++f) result += hidden[f] * to_float(down[(e * kHidden + i) * kExpertFfn + f]);
          sum[i] += weight * result;
        }
      }
      for (u32 i = 0; i < kHidden; ++i) {
        const double difference = to_float(out[token * kHidden + i]) - sum[i];
        wrong += difference * difference, all += sum[i] * sum[i];
      }
    }
    return std::sqrt(wrong / all);
  }
};

}  // namespace

int main(int count, char** arguments) {
  Layer layer(std::atoi(arguments[1]), count > 2);
  Values first;
  for (const Shape& shape : kShapes) {
    for (bool late : {false, true}) {
      late_copies = late;
      const Values out = layer.run(shape);
      if (first.empty()) first = out;
      if (std::memcmp(first.data(), out.data(), out.size() * sizeof(bf16)) != 0) fail("a shape changes bits");
    }
  }
  const double error = layer.error(first);
  std::printf("relative error %.1e\n", error);
  return error < 5e-3 ? 0 : 1;
}

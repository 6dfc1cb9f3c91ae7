#include "services/gpu_engine/cpu/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "services/gpu_engine/cpu/philox.hpp"

namespace blink::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kBlock = 64;  // tokens whose maximum is kept, to find the best few without looking at all

// When the token of this random word and weight arrives. A word stands for (word + 1/2) / 2^32 in (0, 1).
double arrival(uint32_t word, float weight) { return -std::log1p(-(word + 0.5) * 0x1p-32) / weight; }

class Row {
 public:
  Row(const KernelTable& table, const float* raw, int vocabulary, const core::RowSampling& row, const uint32_t* history,
      SamplingScratch& scratch)
      : table_(table), raw_(raw), vocabulary_(vocabulary), row_(row), history_(history), scratch_(scratch) {}

  void logprobs(const Sampled& result) {
    const float top = table_.largest(raw_, vocabulary_);
    scratch_.weights.resize(vocabulary_);
    table_.weigh_logits(raw_, vocabulary_, top, 1.0f, scratch_.weights.data());
    double sum = 0;
    for (float weight : scratch_.weights) sum += weight;
    const double normalizer = top + std::log(sum);
    *result.logprob = static_cast<float>(raw_[*result.token] - normalizer);
    best(raw_, static_cast<int>(std::min<uint32_t>(row_.top_logprobs, vocabulary_)));
    for (size_t i = 0; i < scratch_.order.size(); ++i) {
      result.top_tokens[i] = scratch_.order[i];
      result.top_logprobs[i] = static_cast<float>(raw_[scratch_.order[i]] - normalizer);
    }
  }

  int32_t choose() {
    const float* logits = adjusted();
    const float top = table_.largest(logits, vocabulary_);
    if (row_.temperature == 0 || !(top > kMinusInfinity)) return first_of(logits, top);
    scratch_.weights.resize(vocabulary_);
    float* weights = scratch_.weights.data();
    table_.weigh_logits(logits, vocabulary_, top, 1.0f / row_.temperature, weights);
    const bool limited = row_.top_k != 0 && row_.top_k < static_cast<uint32_t>(vocabulary_);
    int32_t winner;
    if (limited || row_.top_p < 1) {
      keep_likeliest(logits, weights, limited ? static_cast<int>(row_.top_k) : vocabulary_);
      winner = race(weights);
    } else {
      if (row_.min_p > 0)
        for (int i = 0; i < vocabulary_; ++i) weights[i] = weights[i] < row_.min_p ? 0 : weights[i];
      winner = table_.race(weights, vocabulary_, row_.seed, row_.history_length, arrival);
    }
    return winner >= 0 ? winner : first_of(logits, top);
  }

 private:
  // Logits after penalties and suppression; the raw ones when there is neither.
  const float* adjusted() {
    const bool penalized = row_.repetition_penalty != 1 || row_.presence_penalty != 0 || row_.frequency_penalty != 0;
    if (!penalized && row_.suppress_count == 0) return raw_;
    scratch_.logits.assign(raw_, raw_ + vocabulary_);
    if (penalized) penalize();
    for (uint32_t i = 0; i < row_.suppress_count; ++i)
      if (row_.suppress[i] < static_cast<uint32_t>(vocabulary_)) scratch_.logits[row_.suppress[i]] = kMinusInfinity;
    return scratch_.logits.data();
  }

  void penalize() {
    constexpr uint32_t kSeen = 1u << 31;  // beside the count of uses in the output
    auto& counts = scratch_.counts;
    counts.resize(vocabulary_);
    for (uint32_t i = 0; i < row_.history_length; ++i) {
      uint32_t& count = counts[history_[i]];
      count = (count + (i >= row_.prompt_tokens)) | kSeen;
    }
    for (uint32_t i = 0; i < row_.history_length; ++i) {
      const uint32_t token = history_[i], count = counts[token];
      if (count == 0) continue;  // dealt with at its first use
      counts[token] = 0;
      float& logit = scratch_.logits[token];
      logit = logit > 0 ? logit / row_.repetition_penalty : logit * row_.repetition_penalty;
      const uint32_t uses = count & ~kSeen;
      if (uses == 0) continue;
      logit -= row_.frequency_penalty * static_cast<float>(uses);
      logit -= row_.presence_penalty;
    }
  }

  int32_t first_of(const float* logits, float value) const {
    const float* end = logits + vocabulary_;
    const float* found = std::find(logits, end, value);
    return found == end ? 0 : static_cast<int32_t>(found - logits);
  }

  // order: the `count` best tokens by (value, lower id), best first.
  void best(const float* values, int count) {
    auto& order = scratch_.order;
    order.clear();
    if (count == 0) return;
    const int blocks = (vocabulary_ + kBlock - 1) / kBlock;
    auto& maxima = scratch_.block_maxima;
    maxima.resize(blocks);
    for (int b = 0; b < blocks; ++b)
      maxima[b] = table_.largest(values + b * kBlock, std::min(kBlock, vocabulary_ - b * kBlock));
    // The count-th largest maximum has at least `count` values at or above it, seldom many more.
    float threshold = kMinusInfinity;
    if (count <= blocks) {
      auto& sorted = scratch_.sorted_maxima;
      sorted = maxima;
      std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
      threshold = sorted[count - 1];
    }
    for (int b = 0; b < blocks; ++b) {
      if (maxima[b] < threshold) continue;
      for (int i = b * kBlock, end = std::min(vocabulary_, i + kBlock); i < end; ++i)
        if (values[i] >= threshold) order.push_back(i);
    }
    const auto before = [values](int32_t a, int32_t b) {
      return values[a] != values[b] ? values[a] > values[b] : a < b;
    };
    count = std::min(count, static_cast<int>(order.size()));
    if (count < static_cast<int>(order.size()))
      std::nth_element(order.begin(), order.begin() + count, order.end(), before);
    order.resize(count);
    std::sort(order.begin(), order.end(), before);
  }

  static uint64_t mass(float weight) { return static_cast<uint64_t>(static_cast<double>(weight) * 0x1p32); }

  // order: what top_k, top_p and min_p leave.
  void keep_likeliest(const float* logits, const float* weights, int top_k) {
    auto& order = scratch_.order;
    if (row_.top_p >= 1 || top_k < vocabulary_) {
      best(logits, top_k);
      if (row_.top_p < 1) cut_at(total_of(order, weights), weights);
    } else {
      uint64_t total = 0;
      for (int i = 0; i < vocabulary_; ++i) total += mass(weights[i]);
      // The likeliest few nearly always reach top_p: look at more only when they don't.
      for (int looked = std::min(vocabulary_, 128);; looked = std::min(vocabulary_, 8 * looked)) {
        best(logits, looked);
        if (cut_at(total, weights) || looked == vocabulary_) break;
      }
    }
    while (order.size() > 1 && weights[order.back()] < row_.min_p) order.pop_back();
  }

  static uint64_t total_of(const std::vector<int32_t>& tokens, const float* weights) {
    uint64_t total = 0;
    for (int32_t token : tokens) total += mass(weights[token]);
    return total;
  }

  // Shortens `order` to the first tokens that reach top_p of `total`; false when all together don't.
  bool cut_at(uint64_t total, const float* weights) {
    const auto enough = static_cast<uint64_t>(static_cast<double>(row_.top_p) * static_cast<double>(total));
    auto& order = scratch_.order;
    uint64_t sum = 0;
    size_t kept = 0;
    while (kept < order.size() && (kept == 0 || sum < enough)) sum += mass(weights[order[kept++]]);
    order.resize(kept);
    return sum >= enough;
  }

  // Among the tokens of `order`.
  int32_t race(const float* weights) const {
    int32_t winner = -1;
    double soonest = std::numeric_limits<double>::infinity();
    for (int32_t token : scratch_.order) {
      if (!(weights[token] > 0)) continue;
      const auto id = static_cast<uint32_t>(token);
      const PhiloxBlock block = philox(row_.seed, {{id / 4, row_.history_length, 0, 0}});
      const double time = arrival(block.word[id % 4], weights[token]);
      if (time < soonest || (time == soonest && token < winner)) {
        soonest = time;
        winner = token;
      }
    }
    return winner;
  }

  const KernelTable& table_;
  const float* raw_;
  int vocabulary_;
  const core::RowSampling& row_;
  const uint32_t* history_;
  SamplingScratch& scratch_;
};

}  // namespace

void sample(const KernelTable& table, const float* logits, int vocabulary, const core::RowSampling& row,
            const uint32_t* history, SamplingScratch& scratch, const Sampled& result) {
  Row work(table, logits, vocabulary, row, history, scratch);
  *result.token = work.choose();
  *result.logprob = 0;
  if (row.logprobs || row.top_logprobs) work.logprobs(result);
}

}  // namespace blink::cpu

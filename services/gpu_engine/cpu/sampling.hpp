// From logits to a token. The order of operations, which every engine keeps:
//
//   1. log-probabilities, when asked for, of the raw logits
//   2. repetition penalty: logits of tokens in prompt or output, divided when positive, multiplied when negative
//   3. frequency penalty times the count in the output, then presence penalty if any, subtracted
//   4. tokens to suppress (min_tokens) can't be chosen
//   5. temperature 0: the largest logit. Else weight = exp((logit - largest) / temperature), 0 below e^-80
//   6. top_k, then top_p among what is left, then min_p: each keeps the first tokens of the order (logit, then lower
//   id)
//   7. a race among what is left: see race.hpp
//
// Ties go to the lower id throughout. top_p compares sums of weights in units of 2^-32, integers, so that it doesn't
// depend on the order of summation.
#pragma once

#include <cstdint>
#include <vector>

#include "services/gpu_engine/core/request.hpp"
#include "services/gpu_engine/cpu/kernel_table.hpp"

namespace blink::cpu {

// One thread's memory between rows; sized by the first.
struct SamplingScratch {
  std::vector<float> logits;
  std::vector<float> weights;
  std::vector<uint32_t> counts;  // by token: uses in the output, zero between rows
  std::vector<float> block_maxima;
  std::vector<float> sorted_maxima;
  std::vector<int32_t> order;
};

struct Sampled {
  int32_t* token;
  float* logprob;
  int32_t* top_tokens;  // [kMaxTopLogprobs]
  float* top_logprobs;
};

// logits: [vocabulary]. history: the request's prompt and output tokens.
void sample(const KernelTable& table, const float* logits, int vocabulary, const core::RowSampling& row,
            const uint32_t* history, SamplingScratch& scratch, const Sampled& result);

}  // namespace blink::cpu

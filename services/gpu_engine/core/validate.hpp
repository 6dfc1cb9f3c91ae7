// What a descriptor may say. It is a private copy, but every value in it is a gateway's word.
#pragma once

#include "services/gpu_engine/core/state.hpp"

namespace blink::core {

BLINK_FN u64 record_bytes(const ring::Descriptor& descriptor) {
  const u64 tokens = static_cast<u64>(descriptor.prompt_tokens) + descriptor.max_tokens;
  return divide_up(sizeof(ring::Descriptor) + sizeof(u32) * tokens, ring::kLineBytes) * ring::kLineBytes;
}

// False for NaN.
BLINK_FN bool within(float value, float low, float high) { return value >= low && value <= high; }

BLINK_FN bool sampling_is_valid(const ring::Descriptor& d) {
  constexpr u32 kFlags = static_cast<u32>(ring::DescriptorFlag::kIgnoreEos) |
                         static_cast<u32>(ring::DescriptorFlag::kLogprobs) |
                         static_cast<u32>(ring::DescriptorFlag::kNoPrefixCache);
  return within(d.temperature, 0.0f, ring::kMaxTemperature) && within(d.top_p, 0.0f, 1.0f) && d.top_p != 0.0f &&
         within(d.min_p, 0.0f, 1.0f) && within(d.repetition_penalty, 0.0f, ring::kMaxRepetitionPenalty) &&
         d.repetition_penalty != 0.0f &&
         within(d.presence_penalty, -ring::kMaxAdditivePenalty, ring::kMaxAdditivePenalty) &&
         within(d.frequency_penalty, -ring::kMaxAdditivePenalty, ring::kMaxAdditivePenalty) &&
         d.top_logprobs <= ring::kMaxTopLogprobs && (d.flags & ~kFlags) == 0;
}

// `busy`: the slot has a live request. Token ids of the prompt and overlap with other records are checked elsewhere.
BLINK_FN ring::RejectCode validate(const State& state, const ring::Descriptor& d, u64 record_offset, bool busy) {
  const ring::RingInfo& info = state.ring.info;
  const u64 pool_tokens = static_cast<u64>(state.config.page_count) * state.config.page_size;
  const u64 most_tokens = smaller<u64>(static_cast<u64>(d.prompt_tokens) + d.max_tokens, info.max_context_tokens);
  if (busy) return ring::RejectCode::kSlotBusy;
  if (d.prompt_tokens == 0) return ring::RejectCode::kEmptyPrompt;
  if (d.prompt_tokens >= info.max_context_tokens || d.prompt_tokens >= pool_tokens) {
    return ring::RejectCode::kPromptTooLong;
  }
  // A request that could not run alone would never end.
  if (d.max_tokens == 0 || d.min_tokens > d.max_tokens || most_tokens > pool_tokens) {
    return ring::RejectCode::kBadTokenBudget;
  }
  if (record_bytes(d) > info.arena_bytes - record_offset) return ring::RejectCode::kBadRecord;
  if (!sampling_is_valid(d)) return ring::RejectCode::kBadSampling;
  if (d.stop_token_count > ring::kMaxStopTokens) return ring::RejectCode::kBadStopTokens;
  for (u32 i = 0; i < d.stop_token_count; ++i) {
    if (d.stop_tokens[i] >= info.vocabulary_size) return ring::RejectCode::kBadStopTokens;
  }
  if (d.priority < ring::kMinPriority || d.priority > ring::kMaxPriority) return ring::RejectCode::kBadPriority;
  return ring::RejectCode::kNone;
}

}  // namespace blink::core

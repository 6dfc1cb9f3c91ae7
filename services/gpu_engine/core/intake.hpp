// Submissions: doorbell, private copy of the record, validation, queue. The whole team works on one record at a time,
// so that a long prompt is copied and checked by all threads.
#pragma once

#include <cstring>

#include "services/gpu_engine/core/lanes.hpp"
#include "services/gpu_engine/core/release.hpp"
#include "services/gpu_engine/core/validate.hpp"

namespace blink::core {

inline constexpr u32 kSubmissionsPerPoll = 32;  // of one lane, so that a poll is short
inline constexpr u32 kDescriptorWords = sizeof(ring::Descriptor) / sizeof(u32);
inline constexpr u32 kWordsPerLine = ring::kLineBytes / sizeof(u32);

// Ends a submission that never became a request.
BLINK_FN void refuse(State& state, u32 lane_index, u32 slot, u64 position, ring::FinishReason reason,
                     ring::RejectCode code) {
  Lane& lane = state.lanes[lane_index];
  write_log(state.ring, lane_index, lane.log_head++, position, slot, ring::LogKind::kFinish, static_cast<u32>(reason),
            static_cast<u32>(code), 0.0f);
  ++state.counters.finished[static_cast<u32>(reason)];
  if (reason == ring::FinishReason::kRejected) ++lane.rejected;
  if (slot >= state.ring.info.slots_per_lane) return;
  const Request& owner = state.requests[lane_index * state.ring.info.slots_per_lane + slot];
  if (owner.phase == static_cast<u8>(ring::SlotPhase::kFree)) {
    set_slot_status(state.ring, lane_index, slot, position, ring::SlotPhase::kFree, reason);
  }
}

// The queue is shared, but no lane can fill it for another: each has its share of places for itself.
BLINK_FN bool queue_is_full(const State& state, const Lane& lane) {
  const u32 share = larger(state.config.max_waiting / state.ring.info.lanes, 1u);
  return state.waiting.count >= state.config.max_waiting && lane.waiting >= share;
}

// Start-time fair queueing: a lane's rounds count its requests, and none starts behind the virtual round.
BLINK_FN void assign_key(State& state, Lane& lane, Request& request) {
  lane.round = larger(lane.round + 1, state.virtual_round);
  request.order = lane.round - static_cast<i64>(request.priority) * state.config.priority_boost;
  request.arrival = state.arrivals++;
}

BLINK_FN void fill_request(State& state, const ring::Descriptor& d, u32 lane, u64 position, u32 first_line) {
  Request& request = state.requests[lane * state.ring.info.slots_per_lane + d.slot];
  const u64 most_tokens = static_cast<u64>(d.prompt_tokens) + d.max_tokens;
  request.history = lane * state.ring.arena_words() + static_cast<u64>(first_line) * kWordsPerLine + kDescriptorWords;
  request.position = position;
  request.deadline_us = d.time_limit_ms == 0 ? ~u64{0} : state.now_us + u64{1000} * d.time_limit_ms;
  request.known = d.prompt_tokens;
  request.computed = 0;
  request.planned = 0;
  request.line = kNone;
  request.pages = 0;
  request.cached = 0;
  request.chunked = 0;
  request.shares =
      state.config.prefix_cache != 0 && (d.flags & static_cast<u32>(ring::DescriptorFlag::kNoPrefixCache)) == 0;
  request.salt = {{d.cache_salt[0], d.cache_salt[1]}};
  request.lane = static_cast<u8>(lane);
  request.slot = static_cast<u16>(d.slot);
  request.prompt_tokens = d.prompt_tokens;
  request.phase = static_cast<u8>(ring::SlotPhase::kWaiting);
  request.ending = 0;
  request.admitted = 0;
  request.cancelled = 0;
  request.width = static_cast<u8>(1 + d.top_logprobs);
  request.submitted_us = state.now_us;
  request.known_max = static_cast<u32>(smaller<u64>(most_tokens, state.ring.info.max_context_tokens));
  request.known_min = d.prompt_tokens + d.min_tokens;
  request.counted = 0;
  request.first_line = first_line;
  request.lines = static_cast<u32>(record_bytes(d) / ring::kLineBytes);
  request.priority = d.priority;

  RowSampling& sampling = request.sampling;
  sampling.seed = d.seed;
  sampling.history_offset = request.history;
  sampling.prompt_tokens = d.prompt_tokens;
  sampling.temperature = d.temperature;
  sampling.top_p = d.top_p;
  sampling.min_p = d.min_p;
  sampling.repetition_penalty = d.repetition_penalty;
  sampling.presence_penalty = d.presence_penalty;
  sampling.frequency_penalty = d.frequency_penalty;
  sampling.top_k = d.top_k;
  sampling.top_logprobs = d.top_logprobs;
  sampling.logprobs = (d.flags & static_cast<u32>(ring::DescriptorFlag::kLogprobs)) != 0;
  u32 ends = 0;
  if ((d.flags & static_cast<u32>(ring::DescriptorFlag::kIgnoreEos)) == 0) {
    while (ends < state.config.eos_count) {
      sampling.suppress[ends] = state.config.eos[ends];
      ++ends;
    }
  }
  for (u32 i = 0; i < d.stop_token_count; ++i) sampling.suppress[ends++] = d.stop_tokens[i];
  sampling.suppress_count = ends;
}

// Takes one submission in: the one that the doorbell of the lane's next position announces.
template <class Context>
BLINK_RARE_FN void take_submission(Context& context, State& state, u32 lane_index, u32 first_line) {
  const ring::RingInfo& info = state.ring.info;
  Lane& lane = state.lanes[lane_index];
  const u64 position = lane.next_position;
  leader(context, [&] { ++lane.next_position; });

  const u64 record_offset = static_cast<u64>(first_line) * ring::kLineBytes;
  if (info.arena_bytes < sizeof(ring::Descriptor) || record_offset > info.arena_bytes - sizeof(ring::Descriptor)) {
    leader(context, [&] {
      refuse(state, lane_index, kNone, position, ring::FinishReason::kRejected, ring::RejectCode::kBadRecord);
    });
    return;
  }
  const u32* record = state.ring.arena(lane_index) + static_cast<u64>(first_line) * kWordsPerLine;
  for_each(context, kDescriptorWords, [&](u64 i) {
    const u32 word = load_relaxed(record + i);
    memcpy(reinterpret_cast<u8*>(&state.descriptor) + i * sizeof(u32), &word, sizeof(u32));
  });
  const ring::Descriptor& descriptor = state.descriptor;
  const u32 slot = descriptor.slot;
  if (slot >= info.slots_per_lane) {
    leader(context, [&] {
      refuse(state, lane_index, slot, position, ring::FinishReason::kRejected, ring::RejectCode::kBadSlot);
    });
    return;
  }
  const u32 index = lane_index * info.slots_per_lane + slot;
  const bool busy = state.requests[index].phase != static_cast<u8>(ring::SlotPhase::kFree);
  ring::RejectCode code = validate(state, descriptor, record_offset, busy);
  if (code == ring::RejectCode::kNone && (refuses_new(state) || queue_is_full(state, lane))) {
    const auto reason = refuses_new(state) ? ring::FinishReason::kShutdown : ring::FinishReason::kQueueFull;
    leader(context, [&] { refuse(state, lane_index, slot, position, reason, ring::RejectCode::kNone); });
    return;
  }
  const u32 lines = static_cast<u32>(record_bytes(descriptor) / ring::kLineBytes);
  if (code == ring::RejectCode::kNone && any_line_used(context, state, lane_index, first_line, lines)) {
    code = ring::RejectCode::kRecordOverlap;
  }
  if (code == ring::RejectCode::kNone) {
    u32* history = state.history + lane_index * state.ring.arena_words() +
                   static_cast<u64>(first_line) * kWordsPerLine + kDescriptorWords;
    u64 bad = 0;
    for (u64 i = context.thread(); i < descriptor.prompt_tokens; i += context.threads()) {
      history[i] = load_relaxed(record + kDescriptorWords + i);
      bad += history[i] >= info.vocabulary_size;
    }
    if (sum(context, bad) != 0) code = ring::RejectCode::kBadTokenId;
  }
  if (code != ring::RejectCode::kNone) {
    leader(context, [&] { refuse(state, lane_index, slot, position, ring::FinishReason::kRejected, code); });
    return;
  }
  mark_lines(context, state, lane_index, first_line, lines, true);
  leader(context, [&] {
    fill_request(state, descriptor, lane_index, position, first_line);
    assign_key(state, lane, state.requests[index]);
    ++lane.waiting;
    lane.promised += 2;
    set_slot_status(state.ring, lane_index, slot, position, ring::SlotPhase::kWaiting, ring::FinishReason::kNone);
  });
  insert(context, state, state.waiting, index);
}

// Takes in what the lane's doorbells announce, in order. A submission is left where it is while the log has no room
// for the two entries that it may need beside those that are promised: the gateway must read its log first.
template <class Context>
BLINK_RARE_FN void take_submissions(Context& context, State& state, u32 lane_index) {
  Lane& lane = state.lanes[lane_index];
  for (u32 taken = 0; taken < kSubmissionsPerPoll; ++taken) {
    if (log_room(state, lane) < lane.promised + lane.step_promised + 2) break;
    // One thread's look, so that all agree on a word that may change.
    leader(context, [&] {
      const u64 word = load_acquire(state.ring.doorbell(lane_index, lane.next_position));
      const bool rung = word >> 32 == ring::submission_tag(lane.next_position);
      state.doorbell_line = rung ? word & 0xFFFFFFFF : ~u64{0};
    });
    const u64 first_line = state.doorbell_line;
    if (first_line == ~u64{0}) break;
    take_submission(context, state, lane_index, static_cast<u32>(first_line));
  }
  leader(context, [&] { store_release(&state.ring.outbound(lane_index)->next_position, lane.next_position); });
}

}  // namespace blink::core

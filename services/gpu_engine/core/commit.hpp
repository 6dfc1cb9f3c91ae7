// Takes a step's result: history, end conditions, log entries.
#pragma once

#include "services/gpu_engine/core/lanes.hpp"
#include "services/gpu_engine/core/release.hpp"

namespace blink::core {

// How the request ends with `token` as the last of `known`, or kNone.
BLINK_FN ring::FinishReason end_of(const Request& request, const Bounds& bounds, u32 known, u32 token) {
  if (known > bounds.known_min) {
    for (u32 i = 0; i < request.sampling.suppress_count; ++i) {
      if (request.sampling.suppress[i] == token) return ring::FinishReason::kStop;
    }
  }
  return known >= bounds.known_max ? ring::FinishReason::kLength : ring::FinishReason::kNone;
}

// What a row brings: prompt tokens that are new, tokens sampled, requests ending; packed, because a step's tokens fit
// 25 bits and its rows 17 (host_scheduler.hpp checks the settings).
struct RowSums {
  u64 packed = 0;

  BLINK_FN void add(u64 prompt_tokens, bool sampled, bool ending) {
    packed += prompt_tokens << 36 | static_cast<u64>(sampled) << 18 | static_cast<u64>(ending);
  }
  BLINK_FN u64 prompt_tokens() const { return packed >> 36; }
  BLINK_FN u64 sampled() const { return packed >> 18 & 0x3FFFF; }
  BLINK_FN u64 ending() const { return packed & 0x3FFFF; }
};

// A row between its result and its log entries.
struct AbsorbedRow {
  u64 position;
  u32 lane;
  u32 slot;
  u32 entries;  // log entries that it publishes
  u32 token;
  bool logprob;
};

// Counts the row's tokens as computed and appends what was sampled.
BLINK_FN AbsorbedRow absorb_row(State& state, const StepResult& result, u32 row, RowSums& sums) {
  Request& request = state.requests[state.step.request[row]];
  Progress progress = request;
  const Bounds bounds = request;
  const Origin origin = request;
  u32 ending = request.ending;
  // What ended meanwhile drops its token.
  const bool sampled = row < state.step.samples && ending == 0;
  const AbsorbedRow absorbed{origin.position,
                             request.lane,
                             request.slot,
                             sampled ? u32{request.width} : 0,
                             sampled ? static_cast<u32>(result.tokens[row]) : 0,
                             request.sampling.logprobs != 0};
  u32 fresh = 0;
  if (progress.computed < bounds.prompt_tokens) {  // else all of the prompt is counted
    const u32 counted = smaller(progress.computed + progress.planned, bounds.prompt_tokens);
    if (counted > request.counted) {
      fresh = counted - request.counted;
      request.counted = counted;
    }
  }
  if (progress.planned > 1 && request.chunked == progress.computed) request.chunked += progress.planned;
  progress.computed += progress.planned;
  progress.planned = 0;
  if (sampled) {
    state.history[origin.history + progress.known] = absorbed.token;
    ++progress.known;
    ending = static_cast<u32>(end_of(request, bounds, progress.known, absorbed.token));
    if (ending != 0) request.ending = static_cast<u8>(ending);
  }
  static_cast<Progress&>(request) = progress;
  sums.add(fresh, sampled, ending != 0);
  return absorbed;
}

// Keeps the row's log entries until they are published: the next step overwrites where they come from.
BLINK_FN void stage_entries(State& state, const StepResult& result, u32 row, const AbsorbedRow& from, u64 index) {
  StagedEntries& staged = state.staged[row];
  const u32 entries = from.entries;
  staged.place = {index, from.lane, entries};
  for (u32 i = 0; i + 1 < entries; ++i) {
    const u64 place = static_cast<u64>(row) * ring::kMaxTopLogprobs + i;
    staged.entries[i] = log_entry(from.position, from.slot, ring::LogKind::kTopLogprob, 0,
                                  static_cast<u32>(result.top_tokens[place]), result.top_logprobs[place]);
  }
  if (entries == 0) return;
  staged.entries[entries - 1] = log_entry(from.position, from.slot, ring::LogKind::kToken, 0, from.token,
                                          from.logprob ? result.logprobs[row] : 0.0f);
}

// Shows the gateways and probes all that has changed.
template <class Context>
BLINK_RARE_FN void publish(Context& context, State& state) {
  for_each(context, state.staged_rows, [&](u64 row) {
    const StagedEntries& staged = state.staged[row];
    const StagedEntries::Place place = staged.place;
    for (u32 i = 0; i < place.count; ++i) *state.ring.log_entry(place.lane, place.index + i) = staged.entries[i];
  });
  for_each(context, state.ring.info.lanes, [&](u64 i) {
    publish_log(state, static_cast<u32>(i));
    publish_lane_status(state, static_cast<u32>(i));
  });
  leader(context, [&] {
    state.staged_rows = 0;
    store_relaxed(&state.ring.status()->steps, state.steps);
    publish_counters(state);
  });
}

// Ends the step that `plan` began, but publishes nothing: the next step may be planned and launched first, because
// writing to the ring waits for its memory.
template <class Context>
BLINK_FN void absorb(Context& context, State& state, u64 now_us, const StepResult& result) {
  const u32 rows = state.step.rows;
  RowSums sums;
  AbsorbedRow absorbed{};
  claim(
      context, rows, state.ring.info.lanes,
      [&](u32 row) {
        absorbed = absorb_row(state, result, row, sums);
        return absorbed.lane;
      },
      [&](u32) { return static_cast<u64>(absorbed.entries != 0) << 32 | absorbed.entries; },
      [&](u32 index, u64 amount) {  // high half: tokens; low half: entries
        Lane& lane = state.lanes[index];
        const u64 head = lane.log_head;
        lane.log_head = head + (amount & 0xFFFFFFFF);
        lane.generated += amount >> 32;
        return head;
      },
      [&](u32 row, u64 head, u64 before) {
        stage_entries(state, result, row, absorbed, head + (before & 0xFFFFFFFF));
      });
  sums.packed = sum(context, sums.packed);
  if (state.config.prefix_cache && state.step.tokens != rows) publish_prompts(context, state, rows);
  if (sums.ending() != 0) release_ended(context, state, state.running);
  strided(context, state.ring.info.lanes, [&](u64 i) { state.lanes[i].step_promised = 0; });
  leader(context, [&] {
    state.now_us = now_us;
    state.staged_rows = rows;
    state.step.in_flight = 0;
    state.step.tokens = state.step.rows = state.step.samples = 0;
    state.counters.prompt_tokens += sums.prompt_tokens();
    state.counters.generated_tokens += sums.sampled();
    state.counters.step_time_us += now_us - state.step_started_us;
    ++state.steps;
  });
}

template <class Context>
BLINK_FN void commit(Context& context, State& state, u64 now_us, const StepResult& result) {
  absorb(context, state, now_us, result);
  publish(context, state);
}

}  // namespace blink::core

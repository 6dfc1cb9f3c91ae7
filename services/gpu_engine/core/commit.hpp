// Takes a step's result: history, end conditions, log entries.
#pragma once

#include "services/gpu_engine/core/lanes.hpp"
#include "services/gpu_engine/core/release.hpp"

namespace blink::core {

// How the request ends with `token` as the last of its history, or kNone.
BLINK_FN ring::FinishReason end_of(const Request& request, u32 token) {
  if (request.known > request.known_min) {
    for (u32 i = 0; i < request.sampling.suppress_count; ++i) {
      if (request.sampling.suppress[i] == token) return ring::FinishReason::kStop;
    }
  }
  return request.known >= request.known_max ? ring::FinishReason::kLength : ring::FinishReason::kNone;
}

// Counts the row's tokens as computed and appends what was sampled. Returns how many prompt tokens are new.
BLINK_FN u32 absorb_row(State& state, const StepResult& result, u32 row) {
  Request& request = state.requests[state.step.request[row]];
  u32 fresh = 0;
  if (request.computed < request.prompt_tokens) {
    const u32 reached = smaller(request.computed + request.planned, request.prompt_tokens);
    fresh = reached > request.counted ? reached - request.counted : 0;
    request.counted += fresh;
  }
  request.computed += request.planned;
  request.planned = 0;
  state.step.log_entries[row] = 0;
  // What ended meanwhile drops its token.
  if (row < state.step.samples && request.ending == 0) {
    const u32 token = static_cast<u32>(result.tokens[row]);
    state.history[request.history + request.known] = token;
    ++request.known;
    request.ending = static_cast<u8>(end_of(request, token));
    state.step.log_entries[row] = request.width;
  }
  return fresh;
}

BLINK_FN void write_tokens(State& state, const StepResult& result, u32 row) {
  const u32 entries = state.step.log_entries[row];
  if (entries == 0) return;
  const Request& request = state.requests[state.step.request[row]];
  u64 index = state.step.log_index[row];
  for (u32 i = 0; i + 1 < entries; ++i) {
    const u64 place = static_cast<u64>(row) * ring::kMaxTopLogprobs + i;
    write_log(state.ring, request.lane, index++, request.position, request.slot, ring::LogKind::kTopLogprob, 0,
              static_cast<u32>(result.top_tokens[place]), result.top_logprobs[place]);
  }
  write_log(state.ring, request.lane, index, request.position, request.slot, ring::LogKind::kToken, 0,
            static_cast<u32>(result.tokens[row]), request.sampling.logprobs ? result.logprobs[row] : 0.0f);
}

// Ends the step that `plan` began.
template <class Context>
BLINK_FN void commit(Context& context, State& state, u64 now_us, const StepResult& result) {
  const u32 rows = state.step.rows;
  const u32 lanes = state.ring.info.lanes;
  u64 fresh = 0, ending = 0, tokens = 0;
  strided(context, rows, [&](u64 row) {
    fresh += absorb_row(state, result, static_cast<u32>(row));
    tokens += state.step.log_entries[row] != 0;
    ending += state.requests[state.step.request[row]].ending != 0;
  });
  const u64 prompt_tokens = sum(context, fresh);
  const u64 generated = sum(context, tokens);
  const bool release = sum(context, ending) != 0;
  by_key(
      context, rows, [&](u32 row) { return state.requests[state.step.request[row]].lane; },
      [&](u32 row) {
        const u32 entries = state.step.log_entries[row];
        if (entries == 0) return;
        Lane& lane = state.lanes[state.requests[state.step.request[row]].lane];
        state.step.log_index[row] = lane.log_head;
        lane.log_head += entries;
        ++lane.generated;
      });
  for_each(context, rows, [&](u64 row) { write_tokens(state, result, static_cast<u32>(row)); });
  if (release) release_ended(context, state, state.running);
  for_each(context, lanes, [&](u64 i) {
    const u32 lane = static_cast<u32>(i);
    state.lanes[lane].step_promised = 0;
    publish_log(state, lane);
    publish_lane_status(state, lane);
  });
  leader(context, [&] {
    state.now_us = now_us;
    state.step.in_flight = 0;
    state.step.tokens = state.step.rows = state.step.samples = 0;
    state.counters.prompt_tokens += prompt_tokens;
    state.counters.generated_tokens += generated;
    state.counters.step_time_us += now_us - state.step_started_us;
    ring::EngineStatus* status = state.ring.status();
    store_release(&status->steps, load_relaxed(&status->steps) + 1);
    publish_counters(state);
  });
}

}  // namespace blink::core

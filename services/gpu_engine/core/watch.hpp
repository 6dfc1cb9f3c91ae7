// Live requests that must end: cancelled, out of time, their gateway gone, the engine stopping.
#pragma once

#include "services/gpu_engine/core/release.hpp"

namespace blink::core {

inline constexpr u32 kWaitingPerPoll = 512;  // waiting requests looked at by one poll, in turn

BLINK_FN void look_at_cancel(const State& state, Request& request) {
  request.cancelled = load_relaxed(state.ring.cancel(request.lane, request.slot)) == request.position + 1;
}

// Copies the cancels that the next look at the requests will judge.
template <class Context>
BLINK_FN void look_at_requests(Context& context, State& state) {
  strided(context, state.running.count, [&](u64 i) { look_at_cancel(state, state.requests[state.running.items[i]]); });
  const u32 waiting = state.waiting.count;
  strided(context, smaller(waiting, kWaitingPerPoll), [&](u64 i) {
    look_at_cancel(state, state.requests[state.waiting.items[(state.waiting_cursor + i) % waiting]]);
  });
}

// Marks the request if it must end; returns whether it can be released now.
BLINK_FN bool mark_ending(const State& state, Request& request) {
  if (state.lanes[request.lane].closing) {
    request.ending = kSilently;
  } else if (request.ending == 0) {
    auto reason = ring::FinishReason::kNone;
    if (state.command == static_cast<u64>(ring::Command::kStop)) {
      reason = ring::FinishReason::kShutdown;
    } else if (request.cancelled) {
      reason = ring::FinishReason::kCancelled;
    } else if (state.now_us >= request.deadline_us) {
      reason = ring::FinishReason::kTimeLimit;
    }
    request.ending = static_cast<u8>(reason);
  }
  return leaves_now(request);
}

template <class Context>
BLINK_RARE_FN void watch_requests(Context& context, State& state, bool all_waiting) {
  u64 leaving = 0;
  strided(context, state.running.count,
          [&](u64 i) { leaving += mark_ending(state, state.requests[state.running.items[i]]); });
  if (sum(context, leaving) != 0) release_ended(context, state, state.running);

  const u32 waiting = state.waiting.count;
  if (waiting == 0) return;
  const u32 window = all_waiting ? waiting : smaller(waiting, kWaitingPerPoll);
  const u64 first = state.waiting_cursor;
  leaving = 0;
  strided(context, window,
          [&](u64 i) { leaving += mark_ending(state, state.requests[state.waiting.items[(first + i) % waiting]]); });
  leader(context, [&] { state.waiting_cursor = (first + window) % waiting; });
  if (sum(context, leaving) != 0) release_ended(context, state, state.waiting);
}

}  // namespace blink::core

// Which waiting requests get pages, and whom they displace.
#pragma once

#include "services/gpu_engine/core/pages.hpp"

namespace blink::core {

BLINK_FN bool fits(const State& state, const Request& request) {
  return state.free_line_count > 0 && pages_for(state, request.known) <= state.free_page_count;
}

// A lane's log must have room for a token of each of its running requests above ADMITTED and FINISH for each slot.
BLINK_FN bool log_takes(const State& state, const Lane& lane, u32 more_width) {
  return log_room(state, lane) >= u64{2} * state.ring.info.slots_per_lane + lane.token_width + more_width;
}

// The place of the last running request of a paused lane, or kNone. Such a one makes no progress, so whoever else
// needs its pages takes them: a gateway that does not read its log holds nothing that others want.
template <class Context>
BLINK_RARE_FN u32 last_paused(Context& context, const State& state) {
  return find_last(context, state.running.count,
                   [&](u32 i) { return state.lanes[state.requests[state.running.items[i]].lane].paused != 0; });
}

// The first place of the running requests that `request` may displace: all from there on have strictly lower priority
// and come later. Returns the running count when they would not make room enough.
template <class Context>
BLINK_RARE_FN u32 first_displaced(Context& context, const State& state, const Request& request) {
  const auto at = [&](u32 i) -> const Request& { return state.requests[state.running.items[i]]; };
  const u32 count = state.running.count;
  if (count == 0 || at(count - 1).priority >= request.priority) return count;
  const u32 kept = find_last(context, count,
                             [&](u32 i) { return at(i).priority >= request.priority || goes_before(at(i), request); });
  const u32 first = kept == kNone ? 0 : kept + 1;
  u64 pages = 0;
  for (u64 i = first + context.thread(); i < count; i += context.threads()) pages += at(static_cast<u32>(i)).pages;
  pages = sum(context, pages);
  return first < count && state.free_page_count + pages >= pages_for(state, request.known) ? first : count;
}

// Requests evicted by this plan wait in `state.ended` until the waiting queue may change.
struct Evicted {
  u32 count = 0;
  u32 displaced = kNone;  // the last one that lost its place to a higher priority
};

template <class Context>
BLINK_RARE_FN void make_room(Context& context, State& state, const Request& request, Evicted& evicted) {
  while (!fits(state, request)) {
    u32 victim = last_paused(context, state);
    const bool paused = victim != kNone;
    if (!paused) {
      if (first_displaced(context, state, request) == state.running.count) return;
      victim = state.running.count - 1;
    }
    const u32 index = evict(context, state, victim);
    leader(context, [&] { state.ended[evicted.count] = index; });
    if (!paused) evicted.displaced = index;
    ++evicted.count;
  }
}

// Admits in key order; the first that does not fit stops it. Lanes whose log is full stand aside.
template <class Context>
BLINK_RARE_FN void admit_waiting(Context& context, State& state) {
  Evicted evicted;
  u32 admitted = 0;
  const u32 count = state.waiting.count;
  const auto at = [&](u32 i) -> Request& { return state.requests[state.waiting.items[i]]; };
  for (u32 i = 0; i < count; ++i) {
    i = find_first(context, i, count, [&](u32 j) { return state.lanes[at(j).lane].shut == 0; });
    if (i == kNone) break;
    const Request& request = at(i);
    Lane& lane = state.lanes[request.lane];
    if (!log_takes(state, lane, request.width)) {
      leader(context, [&] { lane.shut = 1; });
      continue;
    }
    // What was just displaced comes before all that follow it.
    if (evicted.displaced != kNone && goes_before(state.requests[evicted.displaced], request)) break;
    make_room(context, state, request, evicted);
    if (!fits(state, request)) break;
    admit(context, state, state.waiting.items[i]);
    ++admitted;
  }
  if (admitted != 0) {
    compact(
        context, state.waiting,
        [&](u32 index) { return state.requests[index].phase == static_cast<u8>(ring::SlotPhase::kWaiting); },
        [](u32, u32) {});
  }
  for (u32 i = 0; i < evicted.count; ++i) insert(context, state, state.waiting, state.ended[i]);
}

}  // namespace blink::core

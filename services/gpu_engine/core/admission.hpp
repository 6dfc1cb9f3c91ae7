// Which waiting requests get pages, and whom they displace.
#pragma once

#include "services/gpu_engine/core/pages.hpp"

namespace blink::core {

struct Room {
  bool enough;
  u32 cached;  // the request's first pages that the prefix cache has
};

// Whether `request` could be admitted now. What running requests share with it takes no available page.
template <class Context>
BLINK_RARE_FN Room room_for(Context& context, State& state, const Request& request) {
  if (state.free_line_count == 0) return {false, 0};
  const u32 cached = find_prefix(context, state, request);
  u64 shared = 0;
  strided(context, cached, [&](u64 i) { shared += state.prefixes.pages[state.prefixes.found[i]].references != 0; });
  if (cached != 0) shared = sum(context, shared);
  return {pages_for(state, request.known) - shared <= available_pages(state), cached};
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

// This thread's part of the pages that nobody else would keep from others if `request` were gone.
template <class Context>
BLINK_FN u64 pages_of_its_own(Context& context, const State& state, const Request& request) {
  const i32* table = table_line(state, request);
  u64 pages = context.thread() == 0 ? request.pages - request.cached : 0;
  strided(context, request.cached, [&](u64 i) { pages += state.prefixes.pages[table[i]].references == 1; });
  return pages;
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
  for (u32 i = first; i < count; ++i) pages += pages_of_its_own(context, state, at(i));
  pages = sum(context, pages);
  return first < count && available_pages(state) + pages >= pages_for(state, request.known) ? first : count;
}

// Requests evicted by this plan wait in `state.ended` until the waiting queue may change.
struct Evicted {
  u32 count = 0;
  u32 displaced = kNone;  // the last one that lost its place to a higher priority
};

template <class Context>
BLINK_RARE_FN Room make_room(Context& context, State& state, const Request& request, Evicted& evicted) {
  while (true) {
    const Room room = room_for(context, state, request);
    if (room.enough) return room;
    u32 victim = last_paused(context, state);
    const bool paused = victim != kNone;
    if (!paused) {
      if (first_displaced(context, state, request) == state.running.count) return room;
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
    const Room room = make_room(context, state, request, evicted);
    if (!room.enough) break;
    admit(context, state, state.waiting.items[i], room.cached);
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

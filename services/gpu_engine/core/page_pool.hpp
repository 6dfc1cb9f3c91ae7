// Who may take a KV page. A page is held by one request, or cached; a cached one is referenced by running requests, or
// idle. What is free or idle is available: idle pages are found again until they are reclaimed, longest idle first.
#pragma once

#include "services/gpu_engine/core/state.hpp"

namespace blink::core {

// Reclaiming takes at least this part of all pages, so that a full cache is not asked again by every step.
inline constexpr u32 kReclaimShare = 64;

BLINK_FN u32 available_pages(const State& state) { return state.free_page_count + state.idle.count; }

BLINK_FN i32* table_line(const State& state, const Request& request) {
  return state.step.page_table + static_cast<u64>(request.line) * state.pages_per_sequence;
}

// Where the i-th entry of the queue lies.
BLINK_FN u32 idle_place(const State& state, u32 i) {
  const u32 capacity = 2 * state.config.page_count;
  const u32 place = state.idle.begin + i;
  return place < capacity ? place : place - capacity;
}

// Drops the queue's void entries when `more` would not fit: once in as many releases as there are pages.
template <class Context>
BLINK_RARE_FN void make_idle_room(Context& context, State& state, u32 more) {
  if (u64{state.idle.length} + more <= u64{2} * state.config.page_count) return;
  CachedPage* const pages = state.prefixes.pages;
  u32 page = 0;
  bool idle = false;
  const u64 kept = scan(
      context, state.idle.length,
      [&](u32 i) -> u64 {
        page = state.idle.queue[idle_place(state, i)];
        idle = pages[page].idle_place == idle_place(state, i);
        return idle;
      },
      [&](u32, u64 before) {
        if (!idle) return;
        const u32 place = idle_place(state, static_cast<u32>(before));
        state.idle.queue[place] = page;
        pages[page].idle_place = place;
      });
  leader(context, [&] { state.idle.length = static_cast<u32>(kept); });
}

// Gives back all pages of `request`: its own are free, of cached ones the last to be let go are idle. A sequence's end
// goes first into the queue, so no page is reclaimed before those that follow it.
template <class Context>
BLINK_RARE_FN void release_pages(Context& context, State& state, Request& request) {
  const i32* table = table_line(state, request);
  const u32 cached = request.cached, own = request.pages - cached;
  strided(context, own,
          [&](u64 i) { state.free_pages[state.free_page_count + i] = static_cast<u32>(table[cached + i]); });
  u64 idle = 0;
  if (cached != 0) {
    make_idle_room(context, state, cached);
    CachedPage* const pages = state.prefixes.pages;
    u32 page = 0;
    idle = scan(
        context, cached,
        [&](u32 i) -> u64 {
          page = static_cast<u32>(table[cached - 1 - i]);
          return --pages[page].references == 0;
        },
        [&](u32, u64 before) {
          if (pages[page].references != 0) return;
          const u32 place = idle_place(state, state.idle.length + static_cast<u32>(before));
          state.idle.queue[place] = page;
          pages[page].idle_place = place;
        });
  }
  leader(context, [&] {
    state.free_page_count += own;
    state.idle.length += static_cast<u32>(idle);
    state.idle.count += static_cast<u32>(idle);
    request.pages = 0;
    request.cached = 0;
  });
}

// Makes idle pages free: `wanted` or more of them, which are there.
template <class Context>
BLINK_RARE_FN void reclaim(Context& context, State& state, u32 wanted) {
  wanted = smaller(larger(wanted, state.config.page_count / kReclaimShare), state.idle.count);
  CachedPage* const pages = state.prefixes.pages;
  u32* const reclaimed = state.free_pages + state.free_page_count;
  const u32 length = state.idle.length;
  u32 taken = 0, passed = 0;
  while (taken < wanted && passed < length) {
    const u32 i = passed + context.thread();
    const u32 place = i < length ? idle_place(state, i) : kNone;
    const u32 page = i < length ? state.idle.queue[place] : 0;
    const bool idle = i < length && pages[page].idle_place == place;
    const Scan found = context.exclusive(idle);
    const bool passes = i < length && taken + found.before < wanted;
    if (idle && passes) {
      reclaimed[taken + found.before] = page;
      pages[page].idle_place = kNone;
    }
    passed += static_cast<u32>(sum(context, passes));
    taken = smaller(taken + static_cast<u32>(found.total), wanted);
  }
  context.barrier();
  unlink_pages(context, state.prefixes, taken, [&](u32 i) { return reclaimed[i]; });
  const u32 begin = idle_place(state, passed);
  leader(context, [&] {
    state.free_page_count += taken;
    state.idle.count -= taken;
    state.idle.length -= passed;
    state.idle.begin = begin;
    state.prefixes.looked_for = 0;
  });
}

// Sees to it that so many pages are free; they are available.
template <class Context>
BLINK_FN void ensure_free(Context& context, State& state, u32 wanted) {
  if (wanted > state.free_page_count) reclaim(context, state, wanted - state.free_page_count);
}

}  // namespace blink::core

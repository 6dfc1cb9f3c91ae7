// Lines of the page table and KV pages change hands: constant time for each page, no search.
#pragma once

#include "services/gpu_engine/core/release.hpp"

namespace blink::core {

// Gives waiting request `index` a line and pages for all its known tokens; both are there. The first `cached` pages
// are those that `find_prefix` has just found.
template <class Context>
BLINK_RARE_FN void admit(Context& context, State& state, u32 index, u32 cached) {
  Request& request = state.requests[index];
  const u32 pages = pages_for(state, request.known);
  const u32 found = smaller(cached * state.config.page_size, request.prompt_tokens);  // tokens
  leader(context, [&] {
    Lane& lane = state.lanes[request.lane];
    request.line = state.free_lines[--state.free_line_count];
    request.pages = pages;
    request.cached = cached;
    if (cached != 0) request.chain = state.prefixes.chain[cached - 1];
    state.prefixes.looked_for = 0;
    request.computed = cached * state.config.page_size;
    request.chunked = request.computed;
    request.counted = larger(request.counted, found);
    request.phase = static_cast<u8>(ring::SlotPhase::kRunning);
    state.virtual_round =
        larger(state.virtual_round, request.order + static_cast<i64>(request.priority) * state.config.priority_boost);
    --lane.waiting;
    ++lane.running;
    lane.token_width += request.width;
    if (!request.admitted) {
      request.admitted = 1;
      --lane.promised;
      const float waited = static_cast<float>(state.now_us - request.submitted_us) * 1e-6f;
      write_log(state.ring, request.lane, lane.log_head++, request.position, request.slot, ring::LogKind::kAdmitted, 0,
                found, waited);
      if (request.shares) {
        state.counters.prefix_cache_queries += request.prompt_tokens;
        state.counters.prefix_cache_hits += found;
      }
    }
    set_slot_status(state.ring, request.lane, request.slot, request.position, ring::SlotPhase::kRunning,
                    ring::FinishReason::kNone);
  });
  if (cached != 0) adopt_pages(context, state, request, 0, cached);
  const u32 fresh = pages - cached;
  ensure_free(context, state, fresh);
  i32* table = table_line(state, request) + cached;
  strided(context, fresh, [&](u64 i) { table[i] = static_cast<i32>(state.free_pages[state.free_page_count - 1 - i]); });
  leader(context, [&] { state.free_page_count -= fresh; });
  insert(context, state, state.running, index);
}

// Takes pages and line from the running request at `place` of the key order. Its history stays; it must be put into
// the waiting queue.
template <class Context>
BLINK_RARE_FN u32 evict(Context& context, State& state, u32 place) {
  const u32 index = state.running.items[place];
  Request& request = state.requests[index];
  publish_pages(context, state, request);
  release_pages(context, state, request);
  const u32 last = state.running.count - 1;
  for (u32 from = place; from < last; from += context.threads()) {
    const u32 i = from + context.thread();
    const u32 item = i < last ? state.running.items[i + 1] : 0;
    context.barrier();
    if (i < last) state.running.items[i] = item;
    context.barrier();
  }
  leader(context, [&] {
    Lane& lane = state.lanes[request.lane];
    state.running.count = last;
    state.free_lines[state.free_line_count++] = request.line;
    request.line = kNone;
    request.computed = 0;
    request.chunked = 0;
    request.phase = static_cast<u8>(ring::SlotPhase::kWaiting);
    --lane.running;
    ++lane.waiting;
    lane.token_width -= request.width;
    ++state.counters.preemptions;
    set_slot_status(state.ring, request.lane, request.slot, request.position, ring::SlotPhase::kWaiting,
                    ring::FinishReason::kNone);
  });
  return index;
}

}  // namespace blink::core

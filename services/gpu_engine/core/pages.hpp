// Lines of the page table and KV pages change hands: constant time for each page, no search.
#pragma once

#include "services/gpu_engine/core/release.hpp"

namespace blink::core {

// Gives waiting request `index` a line and pages for all its known tokens; both are there.
template <class Context>
BLINK_RARE_FN void admit(Context& context, State& state, u32 index) {
  Request& request = state.requests[index];
  const u32 pages = pages_for(state, request.known);
  const u32 top = state.free_page_count;
  leader(context, [&] {
    Lane& lane = state.lanes[request.lane];
    request.line = state.free_lines[--state.free_line_count];
    request.pages = pages;
    request.phase = static_cast<u8>(ring::SlotPhase::kRunning);
    state.free_page_count = top - pages;
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
                0, waited);
    }
    set_slot_status(state.ring, request.lane, request.slot, request.position, ring::SlotPhase::kRunning,
                    ring::FinishReason::kNone);
  });
  i32* table = state.step.page_table + static_cast<u64>(request.line) * state.pages_per_sequence;
  for_each(context, pages, [&](u64 i) { table[i] = static_cast<i32>(state.free_pages[top - 1 - i]); });
  insert(context, state, state.running, index);
}

// Takes pages and line from the running request at `place` of the key order. Its history stays; it must be put into
// the waiting queue.
template <class Context>
BLINK_RARE_FN u32 evict(Context& context, State& state, u32 place) {
  const u32 index = state.running.items[place];
  Request& request = state.requests[index];
  leader(context, [&] { request.page_base = state.free_page_count; });
  push_pages(context, state, request);
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
    state.free_page_count += request.pages;
    state.free_lines[state.free_line_count++] = request.line;
    request.pages = 0;
    request.line = kNone;
    request.computed = 0;
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

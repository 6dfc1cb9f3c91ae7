// What the core holds on to, counted by looking at everything. For tests and at the end; one thread.
#pragma once

#include "services/gpu_engine/core/page_pool.hpp"

namespace blink::core {

struct Audit {
  u64 live_requests;
  u64 free_pages;  // idle ones of the prefix cache among them
  u64 free_lines;
  u64 held_arena_lines;      // of live requests, all lanes together
  u64 promised_log_entries;  // kept back for ADMITTED and FINISH of live requests, all lanes together
};

BLINK_FN Audit audit(const State& state) {
  Audit audit{};
  audit.live_requests = u64{state.running.count} + state.waiting.count;
  audit.free_pages = available_pages(state);
  audit.free_lines = state.free_line_count;
  for (u64 i = 0; i < u64{state.ring.info.lanes} * state.bitmap_words; ++i) {
    for (u64 word = state.used_lines[i]; word != 0; word &= word - 1) ++audit.held_arena_lines;
  }
  for (u32 i = 0; i < state.ring.info.lanes; ++i) audit.promised_log_entries += state.lanes[i].promised;
  return audit;
}

}  // namespace blink::core

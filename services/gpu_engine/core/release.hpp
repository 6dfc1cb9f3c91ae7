// Requests leave: their FINISH entry, pages, page table line, arena lines and slot.
#pragma once

#include "services/gpu_engine/core/prefix_cache.hpp"
#include "services/gpu_engine/core/queue.hpp"

namespace blink::core {

// Marks or clears the arena lines of a record. Each word of the bitmap is written by one thread.
template <class Context>
BLINK_RARE_FN void mark_lines(Context& context, State& state, u32 lane, u32 first, u32 count, bool used) {
  u64* words = state.used_lines + static_cast<u64>(lane) * state.bitmap_words;
  const u32 first_word = first / 64, last_word = (first + count - 1) / 64;
  strided(context, last_word - first_word + 1, [&](u64 i) {
    const u32 word = first_word + static_cast<u32>(i);
    u64 mask = ~u64{0};
    if (word == first_word) mask &= ~u64{0} << (first % 64);
    if (word == last_word) mask &= ~u64{0} >> (63 - (first + count - 1) % 64);
    words[word] = used ? words[word] | mask : words[word] & ~mask;
  });
}

template <class Context>
BLINK_RARE_FN bool any_line_used(Context& context, State& state, u32 lane, u32 first, u32 count) {
  const u64* words = state.used_lines + static_cast<u64>(lane) * state.bitmap_words;
  const u32 first_word = first / 64, last_word = (first + count - 1) / 64;
  u64 used = 0;
  strided(context, last_word - first_word + 1, [&](u64 i) {
    const u32 word = first_word + static_cast<u32>(i);
    u64 mask = ~u64{0};
    if (word == first_word) mask &= ~u64{0} << (first % 64);
    if (word == last_word) mask &= ~u64{0} >> (63 - (first + count - 1) % 64);
    used += (words[word] & mask) != 0;
  });
  return sum(context, used) != 0;
}

BLINK_FN bool leaves_now(const Request& request) { return request.ending != 0 && request.planned == 0; }

// Releases every request of `queue` that is ending and has no part in the running step.
template <class Context>
BLINK_RARE_FN void release_ended(Context& context, State& state, Queue& queue) {
  Request* const requests = state.requests;
  const u32 count = compact(
      context, queue, [&](u32 index) { return !leaves_now(requests[index]); },
      [&](u32 index, u32 rank) { state.ended[rank] = index; });
  if (count == 0) return;

  by_key(
      context, count, [&](u32 i) { return requests[state.ended[i]].lane; },
      [&](u32 i) {
        Request& request = requests[state.ended[i]];
        Lane& lane = state.lanes[request.lane];
        lane.promised -= request.admitted ? 1 : 2;
        if (request.phase == static_cast<u8>(ring::SlotPhase::kRunning)) {
          --lane.running;
          lane.token_width -= request.width;
        } else {
          --lane.waiting;
        }
        if (request.ending != kSilently) request.log_index = lane.log_head++;
      });
  by_key(
      context, count, [&](u32 i) { return static_cast<u32>(requests[state.ended[i]].ending); },
      [&](u32 i) {
        const u8 ending = requests[state.ended[i]].ending;
        if (ending != kSilently) ++state.counters.finished[ending];
      });

  const u64 freed_lines = scan(
      context, count, [&](u32 i) -> u64 { return requests[state.ended[i]].line != kNone; },
      [&](u32 i, u64 before) {
        const u32 line = requests[state.ended[i]].line;
        if (line != kNone) state.free_lines[state.free_line_count + before] = line;
      });
  for (u32 i = 0; i < count; ++i) {
    Request& request = requests[state.ended[i]];
    if (request.pages != 0) {
      publish_pages(context, state, request);
      release_pages(context, state, request);
    }
    mark_lines(context, state, request.lane, request.first_line, request.lines, false);
    context.barrier();  // the next record may share a word of the bitmap
  }
  for_each(context, count, [&](u64 i) {
    Request& request = requests[state.ended[i]];
    if (request.ending != kSilently) {
      write_log(state.ring, request.lane, request.log_index, request.position, request.slot, ring::LogKind::kFinish,
                request.ending, 0, 0.0f);
    }
    set_slot_status(
        state.ring, request.lane, request.slot, request.position, ring::SlotPhase::kFree,
        request.ending == kSilently ? ring::FinishReason::kCancelled : static_cast<ring::FinishReason>(request.ending));
    request.phase = static_cast<u8>(ring::SlotPhase::kFree);
    request.ending = 0;
    request.line = kNone;
  });
  leader(context, [&] { state.free_line_count += static_cast<u32>(freed_lines); });
}

}  // namespace blink::core

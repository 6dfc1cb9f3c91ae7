// Fills the step: decode rows first, then prefill chunks, both in key order, under the token budget.
#pragma once

#include <cstddef>
#include <cstring>

#include "services/gpu_engine/core/admission.hpp"
#include "services/gpu_engine/core/lanes.hpp"

namespace blink::core {

BLINK_FN bool may_run(const State& state, const Request& request) {
  return request.ending == 0 && state.lanes[request.lane].paused == 0;
}

BLINK_FN u32 remaining(const Progress& progress) { return progress.known - progress.computed; }

// A row with one token to go computes it and samples the next. Chooses such rows and counts the pages that they begin.
inline constexpr u32 kCountMask = (1 << 21) - 1;  // max_running fits 17 bits

struct DecodeRows {
  u32 rows;
  u32 new_pages;
  u32 longer;  // requests that have more tokens to go, and may
};

template <class Context>
BLINK_FN DecodeRows choose_decode_rows(Context& context, State& state) {
  const u32 budget = state.config.max_batched_tokens;
  const u32 page_size = state.config.page_size;
  Step& step = state.step;
  u64 new_pages = 0;
  u32 index = 0;
  u64 choice = 0;  // from bit 42: 1 for a decode row; from bit 21: 1 for a longer one; below: 1 when it begins a page
  const u64 total = scan(
      context, state.running.count,
      [&](u32 i) -> u64 {
        index = state.running.items[i];
        const Request& request = state.requests[index];
        const Progress progress = request;
        choice = 0;
        if (!may_run(state, request)) return 0;
        if (remaining(progress) > 1) {
          choice = u64{1} << 21;
        } else if (remaining(progress) == 1) {
          choice = u64{1} << 42 | (progress.computed == progress.pages * page_size ? 1 : 0);
        }
        return choice;
      },
      [&](u32, u64 before) {
        const u64 row = before >> 42;
        if (choice >> 42 == 0 || row >= budget) return;
        const bool begins_page = (choice & 1) != 0;
        step.request[row] = index;
        step.new_page[row] = begins_page ? static_cast<u32>(before) & kCountMask : kNone;
        new_pages += begins_page;
      });
  const u32 rows = static_cast<u32>(total >> 42), longer = static_cast<u32>(total >> 21) & kCountMask;
  if (rows <= budget) return {rows, static_cast<u32>(total) & kCountMask, longer};
  return {budget, static_cast<u32>(sum(context, new_pages)), longer};
}

// Chooses decode rows, and sends running requests back to the queue until the pages suffice: paused lanes' first, else
// from the end of the key order. The first one that can run is never sent back, because it fits alone.
template <class Context>
BLINK_FN DecodeRows secure_decode_rows(Context& context, State& state) {
  while (true) {
    const DecodeRows chosen = choose_decode_rows(context, state);
    if (chosen.new_pages <= available_pages(state)) return chosen;
    u32 victim = last_paused(context, state);
    if (victim == kNone) victim = state.running.count - 1;
    const u32 index = evict(context, state, victim);
    insert(context, state, state.waiting, index);
  }
}

struct PrefillRows {
  u32 rows;
  u32 tokens;
};

// How many of `wanted` tokens, two or more, a chunk has where the step has room for `room`. Never one, and never all
// but one, which would be one later: a row of one token may be computed with other last bits than a longer one, and how
// a prompt is cut must not show. Only the step's first chunk may be so, as else prompts would wait for decode rows to
// end that leave room for one or two tokens.
BLINK_FN u32 chunk_of(u32 wanted, u32 room, bool first) {
  if (wanted <= room) return wanted;
  const u32 tokens = wanted - room == 1 ? room - 1 : room;
  if (tokens > 1) return tokens;
  return first ? room : 0;
}

// Shares what is left of the budget among the requests that have more than one token to go.
template <class Context>
BLINK_RARE_FN PrefillRows choose_prefill_rows(Context& context, State& state, u32 decode_rows) {
  const u32 budget = state.config.max_batched_tokens - decode_rows;
  if (budget == 0) return {0, 0};
  Step& step = state.step;
  u64 chosen = 0;  // high half: rows; low half: their tokens
  u32 index = 0;
  u64 choice = 0;  // high half: 1 for a prefill row; low half: its tokens
  scan(
      context, state.running.count,
      [&](u32 i) -> u64 {
        index = state.running.items[i];
        const Request& request = state.requests[index];
        choice = 0;
        if (remaining(request) > 1 && may_run(state, request)) choice = u64{1} << 32 | remaining(request);
        return choice;
      },
      [&](u32, u64 before) {
        const u32 first = static_cast<u32>(before);
        if (choice == 0 || first >= budget) return;
        const u32 tokens = chunk_of(static_cast<u32>(choice), budget - first, first == 0);
        if (tokens == 0) return;
        const u64 row = decode_rows + (before >> 32);
        state.requests[index].planned = tokens;
        step.request[row] = index;
        step.row_start[row] = static_cast<i32>(decode_rows + first);
        chosen += u64{1} << 32 | tokens;
      });
  chosen = sum(context, chosen);
  return {static_cast<u32>(chosen >> 32), static_cast<u32>(chosen)};
}

// Row and sample of the same number: only the last row of a step can be one that is not sampled. A request keeps its
// row while those before it do, and with it what the row has of it already, but for the length. It may leave its row
// before it has known_min tokens and come back after.
BLINK_FN void fill_sampling(State& state, u32 row, const Request& request) {
  RowSampling& sampling = state.step.sampling[row];
  u64& sampled = state.step.sampled[row];
  const bool may_end = request.known >= request.known_min;
  const u64 whose = (request.arrival + 1) << 1 | may_end;
  if (sampled != whose) {
    copy_aligned<alignof(RowSampling)>(&sampling, &request.sampling, offsetof(RowSampling, suppress));
    if (may_end) {
      sampling.suppress_count = 0;
    } else {
      for (u32 i = 0; i < sampling.suppress_count; ++i) sampling.suppress[i] = request.sampling.suppress[i];
    }
    sampled = whose;
  }
  sampling.history_length = request.known;
  state.step.sample_row[row] = static_cast<i32>(row);
}

BLINK_FN void fill_decode_row(State& state, u32 row, u32 page_top) {
  const Step step = state.step;
  Request& request = state.requests[step.request[row]];
  Progress progress = request;
  const u32 line = request.line, new_page = step.new_page[row];
  const u32 token = state.history[request.history + progress.computed];
  if (new_page != kNone) {
    step.page_table[static_cast<u64>(line) * state.pages_per_sequence + progress.pages] =
        static_cast<i32>(state.free_pages[page_top - 1 - new_page]);
    ++progress.pages;
  }
  progress.planned = 1;
  static_cast<Progress&>(request) = progress;
  step.token_ids[row] = static_cast<i32>(token);
  step.positions[row] = static_cast<i32>(progress.computed);
  step.row_start[row] = static_cast<i32>(row);
  step.kv_length[row] = static_cast<i32>(progress.known);
  step.sequence[row] = static_cast<i32>(line);
  fill_sampling(state, row, request);
}

// All threads share each chunk.
template <class Context>
BLINK_RARE_FN void fill_prefill_row(Context& context, State& state, u32 row) {
  Step& step = state.step;
  const Request& request = state.requests[step.request[row]];
  const u32 first = static_cast<u32>(step.row_start[row]);
  const u32* history = state.history + request.history + request.computed;
  strided(context, request.planned, [&](u64 i) {
    step.token_ids[first + i] = static_cast<i32>(history[i]);
    step.positions[first + i] = static_cast<i32>(request.computed + i);
  });
  if (row % context.threads() != context.thread()) return;
  step.kv_length[row] = static_cast<i32>(request.computed + request.planned);
  step.sequence[row] = static_cast<i32>(request.line);
  if (request.planned == remaining(request)) fill_sampling(state, row, request);
}

// Plans one step into `state.step`; false when there is nothing to run. Log entries of those it admits are published
// by the next call that publishes.
template <class Context>
BLINK_FN bool plan(Context& context, State& state, u64 now_us) {
  const u32 lanes = state.ring.info.lanes;
  leader(context, [&] { state.now_us = now_us; });
  for_each(context, lanes, [&](u64 i) {
    Lane& lane = state.lanes[i];
    lane.paused = !log_takes(state, lane, 0);
    lane.shut = lane.paused;  // else it could take back at once what others take from it
  });
  if (state.waiting.count != 0) {
    admit_waiting(context, state);
  }
  if (state.running.count == 0) return false;

  const DecodeRows decode = secure_decode_rows(context, state);
  const PrefillRows prefill = decode.longer != 0 ? choose_prefill_rows(context, state, decode.rows) : PrefillRows{0, 0};
  const u32 rows = decode.rows + prefill.rows;
  if (rows == 0) return false;

  ensure_free(context, state, decode.new_pages);
  const u32 page_top = state.free_page_count;
  strided(context, decode.rows, [&](u64 row) { fill_decode_row(state, static_cast<u32>(row), page_top); });
  for (u32 row = decode.rows; row < rows; ++row) fill_prefill_row(context, state, row);
  strided(context, lanes, [&](u64 i) {
    Lane& lane = state.lanes[i];
    lane.step_promised = lane.paused ? 0 : lane.token_width;
  });
  leader(context, [&] {
    Step& step = state.step;
    state.free_page_count = page_top - decode.new_pages;
    step.tokens = decode.rows + prefill.tokens;
    step.rows = rows;
    step.samples = rows;
    if (prefill.rows != 0) {
      const Request& last = state.requests[step.request[rows - 1]];
      if (last.planned != remaining(last)) --step.samples;
    }
    step.row_start[rows] = static_cast<i32>(step.tokens);
    step.in_flight = 1;
    state.step_started_us = now_us;
  });
  return true;
}

}  // namespace blink::core

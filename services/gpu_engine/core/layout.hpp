// Divides one block of memory into the core's arrays. Called once, by whoever allocates: host code.
#pragma once

#include <type_traits>

#include "services/gpu_engine/core/state.hpp"

namespace blink::core {

// Of the prefix cache, if there is one.
template <class Take>
void lay_out_prefixes(State& state, const Take& take) {
  PrefixIndex& prefixes = state.prefixes;
  const u64 pages = state.config.prefix_cache ? state.config.page_count : 0;
  prefixes.bucket_count = pages == 0 ? 0 : 1;
  while (prefixes.bucket_count < pages) prefixes.bucket_count *= 2;
  take(prefixes.pages, pages);
  take(prefixes.tokens, pages * state.config.page_size);
  take(prefixes.buckets, prefixes.bucket_count);
  take(prefixes.found, pages == 0 ? 0 : state.pages_per_sequence);
  take(prefixes.chain, pages == 0 ? 0 : state.pages_per_sequence);
  take(state.idle.queue, 2 * pages);
}

// Lays the arrays out from `memory` (64-byte aligned, zeroed) and returns the bytes they take. With a null `memory`
// only the size is computed. `state.config` and `state.ring` are set already.
inline u64 lay_out(State& state, u8* memory) {
  const ring::RingInfo& info = state.ring.info;
  const Config& config = state.config;
  const u64 requests = static_cast<u64>(info.lanes) * info.slots_per_lane;
  state.pages_per_sequence =
      static_cast<u32>(smaller<u64>(divide_up(info.max_context_tokens, config.page_size), config.page_count));
  state.bitmap_words = static_cast<u32>(divide_up(state.ring.arena_lines(), 64));

  u64 used = 0;
  const auto take = [&](auto*& array, u64 count) {
    using Item = std::remove_reference_t<decltype(*array)>;
    array = memory ? reinterpret_cast<Item*>(memory + used) : nullptr;
    used += divide_up(count * sizeof(Item), 64) * 64;
  };
  take(state.lanes, info.lanes);
  take(state.requests, requests);
  take(state.history, info.lanes * state.ring.arena_words());
  take(state.used_lines, static_cast<u64>(info.lanes) * state.bitmap_words);
  take(state.waiting.items, requests);
  take(state.running.items, config.max_running);
  take(state.ended, requests);
  take(state.free_pages, config.page_count);
  take(state.free_lines, config.max_running);
  lay_out_prefixes(state, take);
  take(state.step.token_ids, config.max_batched_tokens);
  take(state.step.positions, config.max_batched_tokens);
  take(state.step.row_start, config.max_running + 1);
  take(state.step.kv_length, config.max_running);
  take(state.step.sequence, config.max_running);
  take(state.step.page_table, static_cast<u64>(config.max_running) * state.pages_per_sequence);
  take(state.step.sample_row, config.max_running);
  take(state.step.sampling, config.max_running);
  take(state.step.sampled, config.max_running);
  take(state.step.request, config.max_running);
  take(state.step.new_page, config.max_running);
  take(state.staged, config.max_running);
  return used;
}

}  // namespace blink::core

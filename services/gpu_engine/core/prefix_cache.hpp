// Requests and the prefix cache: what of a prompt is there already, and what of a request others may find.
#pragma once

#include "services/gpu_engine/core/page_pool.hpp"

namespace blink::core {

// Looks for the request's pages [from, to), of which it knows all tokens. Returns the first that is not cached after
// those before it, or `to`; `found` and `chain` of the index are set for all of them. The first `from` are cached and
// in the request's page table.
template <class Context>
BLINK_RARE_FN u32 match_pages(Context& context, State& state, const Request& request, u32 from, u32 to) {
  const PrefixIndex& index = state.prefixes;
  const u32 page_size = state.config.page_size;
  const u32* tokens = state.history + request.history;
  const u64 base = from == 0 ? root_chain(index, request.salt) : request.chain;
  u64 link = 0;
  scan(
      context, to - from,
      [&](u32 i) -> u64 { return link = page_link(index, tokens + u64{from + i} * page_size, page_size, from + i); },
      [&](u32 i, u64 before) {
        index.chain[from + i] = base + before + link;
        index.found[from + i] = find_page(index, key_of(index, base + before + link));
      });
  const u32 miss = find_first(context, from, to, [&](u32 i) {
    const u32 page = index.found[i];
    if (page == kNone) return true;
    const CachedPage& cached = index.pages[page];
    const u32 parent = i == 0      ? kNone
                       : i == from ? static_cast<u32>(table_line(state, request)[i - 1])
                                   : index.found[i - 1];
    if (cached.parent != parent || !(cached.salt == request.salt)) return true;
    for (u32 j = 0; j < page_size; ++j) {
      if (index.tokens[u64{page} * page_size + j] != tokens[u64{i} * page_size + j]) return true;
    }
    return false;
  });
  return miss == kNone ? to : miss;
}

// How many of a waiting request's first pages are cached. The last two tokens are always computed: one, because its
// logits are wanted, two, because a chunk of one token is computed another way (docs/architecture.md).
template <class Context>
BLINK_FN u32 find_prefix(Context& context, State& state, const Request& request) {
  if (!request.shares || request.known < state.config.page_size + 2) return 0;
  PrefixIndex& index = state.prefixes;
  if (index.looked_for == request.arrival + 1) return index.hit;  // it waits for pages, and is asked for in every plan
  const u32 hit = match_pages(context, state, request, 0, (request.known - 2) / state.config.page_size);
  leader(context, [&] {
    index.looked_for = request.arrival + 1;
    index.hit = hit;
    ++index.searches;
  });
  return hit;
}

// Puts the pages [from, to) that were found into the request's page table.
template <class Context>
BLINK_RARE_FN void adopt_pages(Context& context, State& state, const Request& request, u32 from, u32 to) {
  const PrefixIndex& index = state.prefixes;
  i32* table = table_line(state, request);
  u64 woken = 0;
  strided(context, to - from, [&](u64 i) {
    const u32 page = index.found[from + i];
    CachedPage& cached = index.pages[page];
    if (cached.references++ == 0) {
      cached.idle_place = kNone;
      ++woken;
    }
    table[from + i] = static_cast<i32>(page);
  });
  woken = sum(context, woken);
  leader(context, [&] { state.idle.count -= static_cast<u32>(woken); });
}

// Of the request's computed tokens, the first ones: those whose keys and values are what a prefill of the same tokens
// computes, to the bit. From the first token on that a row of one token has computed they are not, unless the engine's
// rows of one token and of more sum in the same order: it has other last bits, and all that follow have read them.
BLINK_FN u32 shareable(const State& state, const Request& request) {
  return state.config.share_decoded ? request.computed : request.chunked;
}

// Lets others find the request's full pages whose tokens are all in the KV cache. Where others have cached the same
// ones meanwhile, theirs take the place of its own, so the parent of a page with references always has some too.
template <class Context>
BLINK_RARE_FN void publish_pages(Context& context, State& state, Request& request) {
  const PrefixIndex& index = state.prefixes;
  const u32 page_size = state.config.page_size;
  const u32 from = request.cached, full = shareable(state, request) / page_size;
  if (!request.shares || full <= from) return;
  const u32 own = match_pages(context, state, request, from, full);
  // Other tokens of the same key are in the way: what follows stays private.
  const u32 clash = find_first(context, own, full, [&](u32 i) { return index.found[i] != kNone; });
  const u32 to = clash == kNone ? full : clash;

  i32* table = table_line(state, request);
  if (own != from) {
    for_each(context, own - from,
             [&](u64 i) { state.free_pages[state.free_page_count + i] = static_cast<u32>(table[from + i]); });
    adopt_pages(context, state, request, from, own);
  }
  const u32* tokens = state.history + request.history;
  strided(context, to - own, [&](u64 i) {
    const u32 place = own + static_cast<u32>(i);
    const u32 parent = place == 0 ? kNone : static_cast<u32>(table[place - 1]);
    index.pages[table[place]] = {key_of(index, index.chain[place]), request.salt, parent, kNone, 1, kNone};
  });
  strided(context, u64{to - own} * page_size, [&](u64 i) {
    const u64 page = static_cast<u32>(table[own + i / page_size]);
    index.tokens[page * page_size + i % page_size] = tokens[u64{own} * page_size + i];
  });
  context.barrier();
  link_pages(context, index, to - own, [&](u32 i) { return static_cast<u32>(table[own + i]); });
  leader(context, [&] {
    state.free_page_count += own - from;
    request.cached = to;
    if (to != 0) request.chain = index.chain[to - 1];
    state.prefixes.looked_for = 0;
  });
}

// After a step: publishes the prompt pages that it filled.
template <class Context>
BLINK_RARE_FN void publish_prompts(Context& context, State& state, u32 rows) {
  const auto of_row = [&](u32 row) -> Request& { return state.requests[state.step.request[row]]; };
  for (u32 row = 0; row < rows; ++row) {
    row = find_first(context, row, rows, [&](u32 i) {
      const Request& request = of_row(i);
      const u32 computed = smaller(shareable(state, request), request.prompt_tokens);
      return request.shares && request.cached < computed / state.config.page_size;
    });
    if (row == kNone) return;
    publish_pages(context, state, of_row(row));
  }
}

}  // namespace blink::core

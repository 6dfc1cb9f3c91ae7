// What the core knows of one request. There is one Request for each slot of each lane, reused by its submissions.
#pragma once

#include "ring_layout.hpp"
#include "services/gpu_engine/core/prefix_index.hpp"

namespace blink::core {

inline constexpr u32 kMaxEosTokens = 8;
inline constexpr u32 kMaxEndTokens = kMaxEosTokens + ring::kMaxStopTokens;

// How to sample one row of a step; the executor reads it. The first 64 bytes are always set, `suppress` up to its
// count.
struct alignas(32) RowSampling {
  u64 seed;
  u64 history_offset;  // of the request's first prompt token in `history`, in words
  u32 history_length;  // prompt and output tokens; also the position of the token to be sampled
  u32 prompt_tokens;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  u32 top_k;
  u32 top_logprobs;
  u32 logprobs;        // 1 when the token's log-probability is wanted
  u32 suppress_count;  // ids that must not be sampled yet (min_tokens)
  u32 suppress[kMaxEndTokens];
};
static_assert(sizeof(RowSampling) == 160);

// Ended without a word to the gateway, because it is no longer there. Not a FinishReason of the ring.
inline constexpr u8 kSilently = 0xFF;

// What every step reads of a request fits one cache line, in parts of 16 bytes that are read and written at once:
// requests lie scattered in memory, and an access of a GPU's threads to as many requests costs the same however wide it
// is.
struct alignas(16) Progress {
  u32 known;     // prompt and output tokens
  u32 computed;  // of them in the KV cache
  u32 planned;   // tokens in the running step
  u32 pages;     // KV pages held, in its line of the page table
};

struct alignas(16) Bounds {
  u32 known_max;  // history length at which it ends with LENGTH
  u32 known_min;  // no end token counts at a shorter history
  u32 prompt_tokens;
  u32 line;  // of the page table
};

struct alignas(16) Origin {
  u64 history;   // offset of the first prompt token, in words
  u64 position;  // of its doorbell
};

struct alignas(64) Request : Progress, Bounds, Origin {
  u64 deadline_us;  // ~0 for none
  u16 slot;
  u8 lane;
  u8 phase;      // SlotPhase
  u8 ending;     // FinishReason or kSilently: leaves at the next release
  u8 admitted;   // its ADMITTED entry is written
  u8 cancelled;  // its gateway said so, as the last poll saw
  u8 width;      // log entries that one token of it takes: itself and its alternatives

  // The rest.
  i64 order;  // smaller goes first; arrival decides ties
  u64 arrival;
  u64 submitted_us;
  u64 log_index;   // scratch: where its FINISH entry goes
  u32 counted;     // prompt tokens in EngineCounters already, or found in the prefix cache
  u32 first_line;  // of its record in the arena
  u32 lines;
  i32 priority;
  u64 chain;             // of its cached pages (prefix_index.hpp)
  u32 cached;            // how many of its first pages are
  u32 shares : 1;        // its prefix is looked for, and found by others
  u32 chunked : 31;      // computed tokens before the first that a row of one token computed
  RowSampling sampling;  // template of its rows; `suppress` holds all its end tokens
  CacheSalt salt;
};

static_assert(sizeof(Request) == 5 * 64);

BLINK_FN bool goes_before(const Request& a, const Request& b) {
  return a.order != b.order ? a.order < b.order : a.arrival < b.arrival;
}

}  // namespace blink::core

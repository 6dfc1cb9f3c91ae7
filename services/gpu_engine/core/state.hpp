// Everything the core owns: settings, lanes, requests, pages, the step. Flat arrays in memory that is handed in.
#pragma once

#include "services/gpu_engine/core/context.hpp"
#include "services/gpu_engine/core/request.hpp"
#include "services/gpu_engine/core/ring_view.hpp"

namespace blink::core {

struct Config {
  u32 page_size;           // tokens of a KV page
  u32 page_count;          // pages of the KV cache
  u32 max_running;         // lines of the page table
  u32 max_batched_tokens;  // of one step
  u32 max_waiting;         // requests queued by submission; preempted ones come on top
  u32 priority_boost;      // rounds that one priority is worth
  u64 lease_us;            // a lane whose lease is not renewed for this long is reclaimed
  u64 cache_seed;          // of the prefix cache's hash: who knows it can make all pages share a bucket
  u32 prefix_cache;        // 1: pages are kept after their requests and found by those that begin alike
  u32 share_decoded;       // 1: so are pages with tokens that rows of one token computed
  u32 eos_count;
  u32 eos[kMaxEosTokens];  // the model's own end tokens
};

struct Lane {
  u64 epoch;       // attached gateway; 0 for none
  u64 last_epoch;  // an epoch is served once
  u64 lease;
  u64 lease_renewed_us;
  u64 seen_epoch;  // the gateway's words, as the last poll saw them
  u64 seen_lease;
  u64 seen_tail;
  u64 seen_doorbell;
  u64 next_position;
  u64 log_head;  // entries written; published when all of a pass are
  u64 log_published;
  u64 log_tail;
  u64 generated;
  i64 round;
  u32 promised;       // log entries kept for requests: ADMITTED and FINISH while waiting, FINISH while running
  u32 step_promised;  // log entries kept for the running step
  u32 token_width;    // log entries that one token of each running request takes together
  u32 running;
  u32 waiting;
  u32 rejected;
  u8 closing;  // the gateway is gone: its requests leave silently, then the lane is free
  u8 paused;   // no room in the log for one token of each running request
  u8 shut;     // this plan admits no more of it
  u8 ready;    // a doorbell is waiting
};

// One ragged batch; docs/architecture.md describes the arrays. The last three are the core's own.
struct Step {
  u32 tokens;
  u32 rows;
  u32 samples;
  u32 in_flight;
  i32* token_ids;         // [max_batched_tokens]
  i32* positions;         // [max_batched_tokens]
  i32* row_start;         // [max_running + 1]
  i32* kv_length;         // [max_running]
  i32* sequence;          // [max_running]
  i32* page_table;        // [max_running, pages_per_sequence]
  i32* sample_row;        // [max_running]
  RowSampling* sampling;  // [max_running]
  u64* sampled;           // [max_running] whose parameters `sampling` has (fill_sampling), 0 for nobody's
  u32* request;           // [max_running]
  u32* new_page;          // [max_running] which of the step's new pages the row gets, or kNone
};

// What a row of the last step adds to its lane's log.
struct StagedEntries {
  struct alignas(16) Place {
    u64 index;  // of the first in the log
    u32 lane;
    u32 count;
  };
  Place place;
  ring::LogEntry entries[ring::kMaxTopLogprobs + 1];
};

struct StepResult {
  const i32* tokens;          // [samples]
  const float* logprobs;      // [samples]
  const i32* top_tokens;      // [samples, kMaxTopLogprobs], read where the row asked for alternatives
  const float* top_logprobs;  // likewise
};

// A sorted list of request indices, smallest key first.
struct Queue {
  u32* items;
  u32 count;
};

// Cached pages without references, in the order in which they lost the last one. Whoever is referenced again leaves a
// void entry behind: an entry counts if its page says that it lies there.
struct IdlePages {
  u32* queue;  // [2 * page_count] circular
  u32 begin;   // place of the oldest entry
  u32 length;  // entries
  u32 count;   // of them not void
};

struct State {
  Config config;
  RingView ring;
  u32 pages_per_sequence;
  u32 bitmap_words;  // of one lane's arena bitmap

  Lane* lanes;        // [lanes]
  Request* requests;  // [lanes * slots_per_lane]
  u32* history;       // [lanes * arena words]: each request's tokens, where its record lies in the arena
  u64* used_lines;    // [lanes, bitmap_words]: arena lines that belong to live requests
  Queue waiting;      // [lanes * slots_per_lane]
  Queue running;      // [max_running]
  u32* ended;         // [lanes * slots_per_lane] scratch of release
  u32* free_pages;    // [page_count] stack
  u32* free_lines;    // [max_running] stack
  u32 free_page_count;
  u32 free_line_count;
  PrefixIndex prefixes;
  IdlePages idle;
  Step step;
  StagedEntries* staged;  // [max_running] of the last step
  u32 staged_rows;        // not yet published

  u64 now_us;
  u64 arrivals;
  i64 virtual_round;  // largest round admitted
  u64 step_started_us;
  u64 heartbeat;  // as last published
  u64 steps;      // committed
  u64 command;
  u64 engine_state;
  u64 waiting_cursor;  // where the next look at waiting requests begins
  u64 doorbell_line;   // scratch of intake: the record's first line, or ~0
  ring::EngineCounters counters;
  ring::Descriptor descriptor;  // private copy of the record being taken in
};

BLINK_FN bool refuses_new(const State& state) { return state.command != static_cast<u64>(ring::Command::kRun); }

BLINK_FN u32 log_room(const State& state, const Lane& lane) {
  return static_cast<u32>(state.ring.info.log_entries - (lane.log_head - lane.log_tail));
}

BLINK_FN u32 pages_for(const State& state, u32 tokens) {
  return static_cast<u32>(divide_up(tokens, state.config.page_size));
}

}  // namespace blink::core

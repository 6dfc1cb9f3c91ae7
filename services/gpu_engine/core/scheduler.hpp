// The scheduling core's four calls: start, poll, plan, commit. docs/architecture.md says what they promise.
//
// plan and commit alternate; poll may be called between any two of them, also while a step runs, and leaves the
// running step alone. All threads of the context call with the same arguments.
#pragma once

#include "services/gpu_engine/core/commit.hpp"
#include "services/gpu_engine/core/intake.hpp"
#include "services/gpu_engine/core/plan.hpp"
#include "services/gpu_engine/core/watch.hpp"

namespace blink::core {

// Shows that the control loop lives. Cheap; one thread.
BLINK_FN void heartbeat(State& state) { store_relaxed(&state.ring.status()->heartbeat, ++state.heartbeat); }

BLINK_FN void set_engine_state(State& state, u64 engine_state) {
  state.engine_state = engine_state;
  store_release(&state.ring.status()->state, engine_state);
}

// The control loop ends here: `code` says why, the state says it to all.
BLINK_FN void fail(State& state, u64 code) {
  store_relaxed(&state.ring.status()->failure, code);
  set_engine_state(state, static_cast<u64>(ring::EngineState::kFailed));
}

// Empties everything and opens the ring under `epoch`, in state BOOTING. Every lane's first position is given.
template <class Context>
BLINK_RARE_FN void start(Context& context, State& state, u64 epoch, u64 first_position) {
  const ring::RingInfo& info = state.ring.info;
  for_each(context, info.lanes, [&](u64 i) {
    const u32 lane = static_cast<u32>(i);
    state.lanes[lane] = Lane{};
    state.lanes[lane].next_position = first_position;
    ring::LaneOutbound* outbound = state.ring.outbound(lane);
    store_relaxed(&outbound->attached_epoch, u64{0});
    store_relaxed(&outbound->log_head, u64{0});
    store_relaxed(&outbound->next_position, first_position);
    store_relaxed(&outbound->attach_log_head, u64{0});
    publish_lane_status(state, lane);
  });
  strided(context, static_cast<u64>(info.lanes) * info.slots_per_lane, [&](u64 i) {
    state.requests[i].phase = static_cast<u8>(ring::SlotPhase::kFree);
    store_relaxed(
        state.ring.slot_status(static_cast<u32>(i / info.slots_per_lane), static_cast<u32>(i % info.slots_per_lane)),
        u64{0});
  });
  strided(context, static_cast<u64>(info.lanes) * state.bitmap_words, [&](u64 i) { state.used_lines[i] = 0; });
  const Config& config = state.config;
  strided(context, state.prefixes.bucket_count, [&](u64 i) { state.prefixes.buckets[i] = kNone; });
  strided(context, config.page_count,
          [&](u64 i) { state.free_pages[i] = static_cast<u32>(config.page_count - 1 - i); });
  strided(context, config.max_running,
          [&](u64 i) { state.free_lines[i] = static_cast<u32>(config.max_running - 1 - i); });
  strided(context, config.max_running, [&](u64 i) { state.step.sampled[i] = 0; });
  leader(context, [&] {
    state.waiting.count = state.running.count = 0;
    state.free_page_count = config.page_count;
    state.prefixes.seed = mixed(config.cache_seed);
    state.prefixes.key_mask = ~u64{0};
    state.prefixes.looked_for = state.prefixes.searches = 0;
    state.idle.begin = state.idle.length = state.idle.count = 0;
    state.free_line_count = config.max_running;
    state.step.tokens = state.step.rows = state.step.samples = state.step.in_flight = 0;
    state.arrivals = 0;
    state.virtual_round = 0;
    state.waiting_cursor = 0;
    state.command = static_cast<u64>(ring::Command::kRun);
    state.counters = ring::EngineCounters{};
    publish_counters(state);
    state.heartbeat = state.steps = 0;
    state.staged_rows = 0;
    ring::EngineStatus* status = state.ring.status();
    store_relaxed(&status->steps, u64{0});
    store_relaxed(&status->heartbeat, u64{0});
    store_relaxed(&status->failure, u64{0});
    set_engine_state(state, static_cast<u64>(ring::EngineState::kBooting));
    store_release(&status->epoch, epoch);
  });
}

// Reads what bootstrap and gateways wrote: orders, leases, cancels, submissions; and the clock.
template <class Context>
BLINK_RARE_FN void poll(Context& context, State& state, u64 now_us) {
  const u32 lanes = state.ring.info.lanes;
  // One round trip to the ring for all that is looked at; only submissions need more.
  strided(context, lanes, [&](u64 i) { look_at_lane(state, static_cast<u32>(i)); });
  look_at_requests(context, state);
  leader(context, [&] {
    state.now_us = now_us;
    state.command = load_relaxed(&state.ring.control()->command);
    heartbeat(state);
    if (refuses_new(state) && state.engine_state == static_cast<u64>(ring::EngineState::kReady)) {
      set_engine_state(state, static_cast<u64>(ring::EngineState::kDraining));
    }
  });
  u64 closing = 0;
  strided(context, lanes, [&](u64 i) {
    watch_lane(state, static_cast<u32>(i));
    closing += state.lanes[i].closing;
  });
  const bool all_waiting = sum(context, closing) != 0 || state.command == static_cast<u64>(ring::Command::kStop);
  watch_requests(context, state, all_waiting);
  for_each(context, lanes, [&](u64 i) { settle_lane(state, static_cast<u32>(i)); });
  for (u32 lane = 0; lane < lanes; ++lane) {
    lane = find_first(context, lane, lanes, [&](u32 i) { return state.lanes[i].ready != 0; });
    if (lane == kNone) break;
    take_submissions(context, state, lane);
  }
  publish(context, state);
}

}  // namespace blink::core

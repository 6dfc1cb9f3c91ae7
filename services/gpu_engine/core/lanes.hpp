// Who owns each lane: attach, leases, giving up (docs/decisions/0004-lane-ownership.md).
#pragma once

#include <cstddef>
#include <cstring>

#include "services/gpu_engine/core/page_pool.hpp"

namespace blink::core {

// Copies what the lane's gateway wrote. Words that announce others are read again, with acquire, before those are.
BLINK_FN void look_at_lane(State& state, u32 index) {
  Lane& lane = state.lanes[index];
  const ring::LaneInbound* inbound = state.ring.inbound(index);
  lane.seen_epoch = load_relaxed(&inbound->gateway_epoch);
  lane.seen_lease = load_relaxed(&inbound->lease);
  lane.seen_tail = load_relaxed(&inbound->log_tail);
  lane.seen_doorbell = load_relaxed(state.ring.doorbell(index, lane.next_position));
}

// Judges whether the lane's gateway is still there. Its requests are, when it turns out to be gone.
BLINK_FN void watch_lane(State& state, u32 index) {
  Lane& lane = state.lanes[index];
  if (lane.epoch == 0) return;
  const u64 epoch = lane.seen_epoch, lease = lane.seen_lease, tail = lane.seen_tail;
  if (lease != lane.lease) {
    lane.lease = lease;
    lane.lease_renewed_us = state.now_us;
  }
  const bool expired = state.now_us - lane.lease_renewed_us > state.config.lease_us;
  if (epoch == lane.epoch && !expired) {
    // A tail that goes back or passes the head is a fault of the gateway: the last good one stays.
    if (tail - lane.log_tail <= lane.log_head - lane.log_tail) lane.log_tail = tail;
    return;
  }
  lane.epoch = 0;
  lane.closing = 1;
  lane.ready = 0;
  store_release(&state.ring.outbound(index)->attached_epoch, u64{0});
}

// Serves the gateway that asks for a free lane, and skips what the last owner may have under way.
BLINK_RARE_FN void attach(State& state, u32 index, u64 epoch) {
  Lane& lane = state.lanes[index];
  lane.next_position += state.ring.info.slots_per_lane;
  lane.epoch = epoch;
  lane.last_epoch = epoch;
  lane.lease = load_acquire(&state.ring.inbound(index)->lease);
  lane.lease_renewed_us = state.now_us;
  lane.log_tail = lane.log_head;
  lane.log_published = lane.log_head;
  ring::LaneOutbound* outbound = state.ring.outbound(index);
  store_relaxed(&outbound->log_head, lane.log_head);
  store_relaxed(&outbound->next_position, lane.next_position);
  store_relaxed(&outbound->attach_log_head, lane.log_head);
  store_release(&outbound->attached_epoch, epoch);
}

// Once the old owner's requests are gone, frees the lane and serves whoever asks for it; then looks at the doorbell.
BLINK_FN void settle_lane(State& state, u32 index) {
  Lane& lane = state.lanes[index];
  if (lane.closing && lane.running + lane.waiting == 0) lane.closing = 0;
  if (lane.epoch != 0) {
    lane.ready = lane.seen_doorbell >> 32 == ring::submission_tag(lane.next_position);
  } else if (!lane.closing && lane.seen_epoch != 0 && lane.seen_epoch != lane.last_epoch) {
    // What the gateway reset before it wrote the epoch is seen from here on. One that changes it again waits a poll.
    const u64 epoch = load_acquire(&state.ring.inbound(index)->gateway_epoch);
    if (epoch == lane.seen_epoch) attach(state, index, epoch);
  }
}

// Whether a gateway asks for a free lane, has rung a served one's doorbell or has read a full log: what the next step
// must not miss, in one round trip and without changing anything. All else can wait for the next poll.
BLINK_FN bool has_news(const State& state, u32 index) {
  const Lane& lane = state.lanes[index];
  if (lane.epoch == 0) {
    const u64 epoch = load_relaxed(&state.ring.inbound(index)->gateway_epoch);
    return epoch != 0 && epoch != lane.last_epoch;
  }
  const u64 doorbell = load_relaxed(state.ring.doorbell(index, lane.next_position));
  const u64 tail = lane.paused ? load_relaxed(&state.ring.inbound(index)->log_tail) : lane.log_tail;
  return doorbell >> 32 == ring::submission_tag(lane.next_position) || tail != lane.log_tail;
}

// Makes the lane's new log entries visible.
BLINK_FN void publish_log(State& state, u32 index) {
  Lane& lane = state.lanes[index];
  if (lane.log_published == lane.log_head) return;
  lane.log_published = lane.log_head;
  store_release(&state.ring.outbound(index)->log_head, lane.log_head);
}

BLINK_FN void publish_lane_status(State& state, u32 index) {
  const Lane& lane = state.lanes[index];
  ring::LaneStatus* status = state.ring.lane_status(index);
  const auto phase = lane.epoch != 0 ? ring::LanePhase::kAttached : ring::LanePhase::kFree;
  store_relaxed(&status->generated_tokens, lane.generated);
  store_relaxed(&status->phase, static_cast<u32>(phase));
  store_relaxed(&status->running, lane.running);
  store_relaxed(&status->waiting, lane.waiting);
  store_relaxed(&status->rejected, lane.rejected);
  store_relaxed(&status->log_backlog, static_cast<u32>(lane.log_head - lane.log_tail));
}

BLINK_FN void publish_counters(State& state) {
  ring::EngineCounters& counters = state.counters;
  counters.running = state.running.count;
  counters.waiting = state.waiting.count;
  counters.kv_pages_total = state.config.page_count;
  counters.kv_pages_free = available_pages(state);
  u64* words = state.ring.at<u64>(ring::kEngineCountersOffset);
  for (u32 i = 0; i < offsetof(ring::EngineCounters, padding) / sizeof(u64); ++i) {
    u64 word;
    memcpy(&word, reinterpret_cast<const u8*>(&counters) + i * sizeof(u64), sizeof(u64));
    store_relaxed(words + i, word);
  }
}

}  // namespace blink::core

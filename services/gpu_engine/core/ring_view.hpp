// Where things lie in the ring, and typed access to them. Geometry is copied from RingInfo once; all that a gateway
// can write is read word by word, because it may change at any moment.
#pragma once

#include "ring_layout.hpp"
#include "services/gpu_engine/core/platform.hpp"

namespace blink::core {

struct RingView {
  u8* base;
  u8* outbound_base;    // of all lanes' outbound areas: base + info.outbound_offset, or other memory
  ring::RingInfo info;  // a private copy

  template <class T>
  BLINK_FN T* at(u64 offset) const {
    return reinterpret_cast<T*>(base + offset);
  }

  BLINK_FN const ring::BootstrapControl* control() const {
    return at<ring::BootstrapControl>(ring::kBootstrapControlOffset);
  }
  BLINK_FN ring::EngineStatus* status() const { return at<ring::EngineStatus>(ring::kEngineStatusOffset); }
  BLINK_FN ring::LaneStatus* lane_status(u32 lane) const {
    return at<ring::LaneStatus>(info.lane_status_offset) + lane;
  }

  BLINK_FN u64 inbound_at(u32 lane) const { return info.inbound_offset + lane * info.inbound_stride; }
  BLINK_FN const ring::LaneInbound* inbound(u32 lane) const { return at<ring::LaneInbound>(inbound_at(lane)); }
  BLINK_FN const u64* doorbell(u32 lane, u64 position) const {
    return at<u64>(inbound_at(lane) + info.doorbells_offset) + position % info.slots_per_lane;
  }
  BLINK_FN const u64* cancel(u32 lane, u32 slot) const {
    return at<u64>(inbound_at(lane) + info.cancels_offset) + slot;
  }
  BLINK_FN const u32* arena(u32 lane) const { return at<u32>(inbound_at(lane) + info.arena_offset); }

  template <class T>
  BLINK_FN T* outbound_at(u32 lane, u64 offset) const {
    return reinterpret_cast<T*>(outbound_base + lane * info.outbound_stride + offset);
  }
  BLINK_FN ring::LaneOutbound* outbound(u32 lane) const { return outbound_at<ring::LaneOutbound>(lane, 0); }
  BLINK_FN u64* slot_status(u32 lane, u32 slot) const { return outbound_at<u64>(lane, info.slot_status_offset) + slot; }
  BLINK_FN ring::LogEntry* log_entry(u32 lane, u64 index) const {
    return outbound_at<ring::LogEntry>(lane, info.log_offset) + index % info.log_entries;
  }

  BLINK_FN u64 arena_words() const { return info.arena_bytes / sizeof(u32); }
  BLINK_FN u32 arena_lines() const { return static_cast<u32>(info.arena_bytes / ring::kLineBytes); }
};

BLINK_FN void set_slot_status(const RingView& view, u32 lane, u32 slot, u64 position, ring::SlotPhase phase,
                              ring::FinishReason reason) {
  const u64 word =
      static_cast<u64>(ring::submission_tag(position)) << 32 | static_cast<u64>(phase) << 16 | static_cast<u64>(reason);
  store_relaxed(view.slot_status(lane, slot), word);
}

BLINK_FN ring::LogEntry log_entry(u64 position, u32 slot, ring::LogKind kind, u32 detail, u32 token, float value) {
  ring::LogEntry entry{};
  entry.tag = ring::submission_tag(position);
  entry.slot = static_cast<u16>(slot);
  entry.kind = static_cast<u8>(kind);
  entry.detail = static_cast<u8>(detail);
  entry.token = token;
  entry.value = value;
  return entry;
}

BLINK_FN void write_log(const RingView& view, u32 lane, u64 index, u64 position, u32 slot, ring::LogKind kind,
                        u32 detail, u32 token, float value) {
  *view.log_entry(lane, index) = log_entry(position, slot, kind, detail, token, value);
}

}  // namespace blink::core

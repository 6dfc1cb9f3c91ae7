// A small ring and an honest gateway that checks what it gets, for programs that run under sanitizers.
#pragma once

#include <array>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "services/gpu_engine/core/ring_view.hpp"

namespace blink::stress {

using namespace core;

inline constexpr u32 kLanes = 2, kSlots = 4, kLogEntries = 96, kVocabulary = 100, kContext = 48;
inline constexpr u64 kArenaBytes = 1 << 12, kRecordSpace = kArenaBytes / kSlots;

inline u64 aligned(u64 value, u64 unit) { return divide_up(value, unit) * unit; }

// The same sums as RingGeometry in services/ring/schema.py.
inline ring::RingInfo make_info() {
  ring::RingInfo info{};
  info.magic = ring::kMagic;
  info.abi_version = ring::kAbiVersion;
  info.layout_hash = ring::kLayoutHash;
  info.lanes = kLanes;
  info.slots_per_lane = kSlots;
  info.log_entries = kLogEntries;
  info.arena_bytes = kArenaBytes;
  info.vocabulary_size = kVocabulary;
  info.max_context_tokens = kContext;
  info.lane_status_offset = ring::kEngineCountersOffset + sizeof(ring::EngineCounters);
  info.doorbells_offset = sizeof(ring::LaneInbound);
  info.cancels_offset = info.doorbells_offset + aligned(8 * kSlots, 64);
  info.arena_offset = info.cancels_offset + aligned(8 * kSlots, 64);
  info.inbound_offset = aligned(info.lane_status_offset + kLanes * sizeof(ring::LaneStatus), 4096);
  info.inbound_stride = aligned(info.arena_offset + kArenaBytes, 4096);
  info.outbound_offset = info.inbound_offset + kLanes * info.inbound_stride;
  info.slot_status_offset = sizeof(ring::LaneOutbound);
  info.log_offset = info.slot_status_offset + aligned(8 * kSlots, 64);
  info.outbound_stride = aligned(info.log_offset + kLogEntries * sizeof(ring::LogEntry), 4096);
  info.ring_bytes = info.outbound_offset + kLanes * info.outbound_stride;
  return info;
}

// What the pretended model says after `length` tokens that end in `last`.
inline u32 next_token(u32 last, u32 length, u64 seed) {
  return static_cast<u32>((last * 31u + length * 7u + seed * 13u) % kVocabulary);
}

struct Gateway {
  RingView view;
  u32 lane;
  u64 position = 0, tail = 0, lease = 1;

  u64* word(u64 offset) const { return view.at<u64>(view.inbound_at(lane) + offset); }
  ring::LaneOutbound* outbound() const { return view.outbound(lane); }

  void attach(u64 epoch) {
    store_release(word(offsetof(ring::LaneInbound, gateway_epoch)), epoch);
    while (load_acquire(&outbound()->attached_epoch) != epoch) std::this_thread::yield();
    position = load_relaxed(&outbound()->next_position);
    tail = load_relaxed(&outbound()->attach_log_head);
  }

  void write_record(u64 offset, const ring::Descriptor& descriptor, const u32* prompt, u32 prompt_tokens) const {
    u32* arena = view.at<u32>(view.inbound_at(lane) + view.info.arena_offset + offset);
    std::array<u32, sizeof(descriptor) / 4> words;
    std::memcpy(words.data(), &descriptor, sizeof(descriptor));
    for (u32 i = 0; i < words.size(); ++i) store_relaxed(arena + i, words[i]);
    for (u32 i = 0; i < prompt_tokens; ++i) store_relaxed(arena + words.size() + i, prompt[i]);
  }

  void ring_doorbell(u64 offset) {
    store_release(const_cast<u64*>(view.doorbell(lane, position)), ring::doorbell_word(position, offset));
    ++position;
  }

  void acknowledge() {
    store_release(word(offsetof(ring::LaneInbound, log_tail)), tail);
    store_release(word(offsetof(ring::LaneInbound, lease)), ++lease);
  }
};

inline ring::Descriptor make_descriptor(u32 slot, u32 prompt_tokens, u32 max_tokens, u64 seed) {
  ring::Descriptor descriptor{};
  descriptor.seed = seed;
  descriptor.slot = slot;
  descriptor.prompt_tokens = prompt_tokens;
  descriptor.max_tokens = max_tokens;
  descriptor.flags = static_cast<u32>(ring::DescriptorFlag::kIgnoreEos);
  descriptor.top_p = descriptor.repetition_penalty = 1.0f;
  return descriptor;
}

// Sends `requests` through its slots, cancels some, and checks every token of the others. Returns the faults seen.
inline u32 honest_gateway(Gateway& gateway, u32 requests) {
  struct Expected {
    u64 position = 0, seed = 0;
    u32 last = 0, length = 0, left = 0;
    bool busy = false, cancelled = false;
  };
  std::array<Expected, kSlots> slots;
  std::mt19937 random(1);
  gateway.attach(11);
  u32 sent = 0, ended = 0, faults = 0;
  while (ended < requests) {
    for (u32 slot = 0; slot < kSlots && sent < requests; ++slot) {
      Expected& expected = slots[slot];
      if (expected.busy) continue;
      std::array<u32, 16> prompt;
      for (u32 i = 0; i < prompt.size(); ++i) prompt[i] = i == 0 ? random() % 2 : i;  // prefixes that others have had
      const u32 prompt_tokens = 1 + random() % 16, max_tokens = 1 + random() % 12;
      expected = {gateway.position, sent, prompt[prompt_tokens - 1], prompt_tokens, max_tokens, true, false};
      gateway.write_record(slot * kRecordSpace, make_descriptor(slot, prompt_tokens, max_tokens, sent), prompt.data(),
                           prompt_tokens);
      gateway.ring_doorbell(slot * kRecordSpace);
      ++sent;
      if (random() % 8 == 0) {
        expected.cancelled = true;
        store_release(const_cast<u64*>(gateway.view.cancel(gateway.lane, slot)), expected.position + 1);
      }
    }
    const u64 head = load_acquire(&gateway.outbound()->log_head);
    for (; gateway.tail < head; ++gateway.tail) {
      const ring::LogEntry entry = *gateway.view.log_entry(gateway.lane, gateway.tail);
      Expected& expected = slots[entry.slot % kSlots];
      faults += entry.tag != ring::submission_tag(expected.position) || !expected.busy;
      if (entry.kind == static_cast<u8>(ring::LogKind::kToken)) {
        expected.last = next_token(expected.last, expected.length++, expected.seed);
        faults += entry.token != expected.last || expected.left-- == 0;
      } else if (entry.kind == static_cast<u8>(ring::LogKind::kFinish)) {
        const auto reason = static_cast<ring::FinishReason>(entry.detail);
        const bool whole = reason == ring::FinishReason::kLength && expected.left == 0;
        if (!whole && !(reason == ring::FinishReason::kCancelled && expected.cancelled)) {
          std::printf("request %llu: finish %u, code %u, %u tokens short\n",
                      static_cast<unsigned long long>(expected.seed), entry.detail, entry.token, expected.left);
          ++faults;
        }
        expected.busy = false;
        ++ended;
      }
    }
    gateway.acknowledge();
    std::this_thread::yield();
  }
  return faults;
}

}  // namespace blink::stress

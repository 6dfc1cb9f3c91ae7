// The core as a block of real threads beside real gateway threads, for sanitizers: an honest gateway that checks what
// it gets, and a hostile one that writes anything anywhere in its inbound area. Prints "ok" when all came out right.
//
// usage: stress THREADS REQUESTS
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>

#include "services/gpu_engine/core/host_scheduler.hpp"

using namespace blink::core;
namespace ring = blink::ring;

namespace {

constexpr u32 kLanes = 2, kSlots = 4, kLogEntries = 96, kVocabulary = 100, kContext = 48;
constexpr u64 kArenaBytes = 1 << 12, kRecordSpace = kArenaBytes / kSlots;

u64 aligned(u64 value, u64 unit) { return divide_up(value, unit) * unit; }

// The same sums as RingGeometry in services/ring/schema.py.
ring::RingInfo make_info() {
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
u32 next_token(u32 last, u32 length, u64 seed) {
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

ring::Descriptor make_descriptor(u32 slot, u32 prompt_tokens, u32 max_tokens, u64 seed) {
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
u32 honest_gateway(Gateway& gateway, u32 requests) {
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

void hostile_gateway(Gateway& gateway, const std::atomic<bool>& done) {
  std::mt19937_64 random(2);
  const u64 words = gateway.view.info.inbound_stride / 8;
  u64 epoch = 100;
  while (!done.load(std::memory_order_relaxed)) {
    const u64 place = 1 + random() % (words - 1);
    store_release(gateway.word(8 * place), random());
    if (random() % 4 == 0) {  // a plausible submission among the noise
      const u64 offset = random() % (kArenaBytes / 64) * 64;
      if (offset + 256 <= kArenaBytes) {
        const std::array<u32, 4> prompt{1, 2, 3, 4};
        gateway.write_record(offset, make_descriptor(random() % kSlots, 1 + random() % 4, 1 + random() % 40, 0),
                             prompt.data(), prompt.size());
      }
      gateway.position = load_relaxed(&gateway.outbound()->next_position);
      gateway.ring_doorbell(offset);
    }
    if (random() % 16 == 0) {
      store_release(gateway.word(offsetof(ring::LaneInbound, log_tail)),
                    load_acquire(&gateway.outbound()->log_head) + random() % 2);
    }
    if (random() % 64 == 0) store_release(gateway.word(0), random() % 4 ? ++epoch : 0);
    if (random() % 64 == 0) {  // changes its mind faster than it can be polled
      for (u32 i = 0; i < 256; ++i) store_release(gateway.word(0), i % 2 ? ++epoch : 0);
    }
    if (random() % 8 == 0) std::this_thread::yield();
  }
  store_release(gateway.word(0), u64{0});
}

}  // namespace

int main(int, char** arguments) {
  const u32 threads = static_cast<u32>(std::atoi(arguments[1]));
  const u32 requests = static_cast<u32>(std::atoi(arguments[2]));
  const ring::RingInfo info = make_info();
  const std::shared_ptr<void> memory(std::aligned_alloc(4096, info.ring_bytes), std::free);
  u8* base = static_cast<u8*>(memory.get());
  std::memset(base, 0, info.ring_bytes);
  std::memcpy(base, &info, sizeof(info));

  Config config{};
  config.page_size = 4;
  config.page_count = 14;
  config.max_running = 5;
  config.max_batched_tokens = 12;
  config.max_waiting = kLanes * kSlots;
  config.priority_boost = 4;
  config.lease_us = ~u64{0} >> 8;
  config.prefix_cache = 1;
  HostScheduler scheduler(base, info.ring_bytes, config, 0xFFFFFFFF - 2 * kSlots, threads);
  scheduler.start(1);

  const RingView view{base, base + info.outbound_offset, info};
  std::atomic<bool> done{false};
  u32 faults = 0;
  Gateway hostile_side{view, 1}, honest_side{view, 0};
  std::thread hostile([&] { hostile_gateway(hostile_side, done); });
  std::thread honest([&] {
    faults = honest_gateway(honest_side, requests);
    done.store(true);
  });
  u64 now = 0;
  std::array<i32, 8> tokens;
  std::array<float, 8> logprobs{};
  std::array<i32, 8 * ring::kMaxTopLogprobs> top_tokens{};
  std::array<float, 8 * ring::kMaxTopLogprobs> top_logprobs{};
  u64 served = 0;
  u32 stale_epochs =
      0;  // the hostile gateway's epochs only grow: one that is 0, or was there before, was never asked for
  const auto step = [&] {
    scheduler.poll(++now);
    const u64 last = scheduler.state().lanes[1].last_epoch;
    stale_epochs += last < served;
    served = last;
    if (!scheduler.plan(now)) return;
    scheduler.poll(++now);
    const Step& planned = scheduler.state().step;
    for (u32 i = 0; i < planned.samples; ++i) {
      const i32 last = planned.token_ids[planned.row_start[planned.sample_row[i] + 1] - 1];
      const RowSampling& how = planned.sampling[i];
      tokens[i] = static_cast<i32>(next_token(static_cast<u32>(last), how.history_length, how.seed));
    }
    scheduler.commit(now, {tokens.data(), logprobs.data(), top_tokens.data(), top_logprobs.data()});
  };
  while (!done.load()) step();
  hostile.join();
  honest.join();
  for (u32 i = 0; i < 4; ++i) step();

  const State& state = scheduler.state();
  u64 lines = 0;
  for (u32 i = 0; i < kLanes * state.bitmap_words; ++i) lines += state.used_lines[i] != 0;
  faults += stale_epochs;
  const bool empty = available_pages(state) == config.page_count && state.free_line_count == config.max_running &&
                     state.running.count + state.waiting.count == 0 && lines == 0;
  std::printf("%s: %u faults, %u of %u pages free, %u of them idle, %llu rejected, %llu preemptions\n",
              faults == 0 && empty ? "ok" : "wrong", faults, available_pages(state), config.page_count,
              state.idle.count, static_cast<unsigned long long>(state.counters.finished[5]),
              static_cast<unsigned long long>(state.counters.preemptions));
  return faults == 0 && empty ? 0 : 1;
}

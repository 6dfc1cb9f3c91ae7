// The core as a block of real threads beside real gateway threads, for sanitizers: an honest gateway that checks what
// it gets, and a hostile one that writes anything anywhere in its inbound area. Prints "ok" when all came out right.
//
// usage: stress THREADS REQUESTS
#include <atomic>

#include "services/gpu_engine/core/host_scheduler.hpp"
#include "tests/gpu_engine/core/stress_ring.hpp"

using namespace blink::stress;
namespace ring = blink::ring;

namespace {

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
  config.share_decoded = 1;
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

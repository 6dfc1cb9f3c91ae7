// The scheduling core on the host: owns its memory, checks settings and calls, runs serially or on a team of threads.
#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "services/gpu_engine/core/layout.hpp"
#include "services/gpu_engine/core/scheduler.hpp"
#include "services/gpu_engine/core/thread_context.hpp"

namespace blink::core {

inline void require(const char* name, u64 value, u64 low, u64 high) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", must be " +
                                std::to_string(low) + " to " + std::to_string(high));
  }
}

// The header is bootstrap's, so it is trusted to be consistent; what is checked is that it is a ring, of this build,
// and that the memory holds it.
inline ring::RingInfo read_ring_info(const u8* ring, u64 bytes) {
  require("ring bytes", bytes, sizeof(ring::RingInfo), ~u64{0});
  ring::RingInfo info;
  std::memcpy(&info, ring + ring::kRingInfoOffset, sizeof(info));
  require("ring magic", info.magic, ring::kMagic, ring::kMagic);
  require("ring abi_version", info.abi_version, ring::kAbiVersion, ring::kAbiVersion);
  require("ring layout_hash", info.layout_hash, ring::kLayoutHash, ring::kLayoutHash);
  require("ring ring_bytes", info.ring_bytes, sizeof(ring::RingInfo), bytes);
  require("ring lanes", info.lanes, 1, 256);
  require("ring slots_per_lane", info.slots_per_lane, 1, 4096);
  require("ring log_entries", info.log_entries, 4 * u64{info.slots_per_lane} + ring::kMaxTopLogprobs + 1, u64{1} << 31);
  require("ring vocabulary_size", info.vocabulary_size, 1, u64{1} << 31);
  require("ring max_context_tokens", info.max_context_tokens, 2, u64{1} << 24);
  require("ring outbound end", info.outbound_offset + info.lanes * info.outbound_stride, 0, info.ring_bytes);
  return info;
}

inline void check(const Config& config) {
  require("page_size", config.page_size, 1, 1 << 16);
  require("page_count", config.page_count, 1, u64{1} << 30);
  require("max_running", config.max_running, 1, 1 << 16);
  require("max_batched_tokens", config.max_batched_tokens, 1, 1 << 24);
  require("max_waiting", config.max_waiting, 1, u64{1} << 31);
  require("priority_boost", config.priority_boost, 0, 1 << 20);
  require("lease_us", config.lease_us, 1, u64{1} << 60);
  require("prefix_cache", config.prefix_cache, 0, 1);
  require("share_decoded", config.share_decoded, 0, 1);
  require("number of eos_token_ids", config.eos_count, 0, kMaxEosTokens);
}

class HostScheduler {
 public:
  // `outbound` is the memory of the outbound areas when it is not the ring's own.
  HostScheduler(u8* ring, u64 ring_bytes, const Config& config, u64 first_position, u32 threads, u8* outbound = nullptr,
                u64 outbound_bytes = 0)
      : first_position_(first_position), threads_(threads), team_(threads) {
    require("threads", threads, 1, 64);
    check(config);
    state_ = std::make_unique<State>();
    state_->config = config;
    const ring::RingInfo info = read_ring_info(ring, ring_bytes);
    if (outbound != nullptr) require("outbound bytes", outbound_bytes, info.lanes * info.outbound_stride, ~u64{0});
    state_->ring = RingView{ring, outbound != nullptr ? outbound : ring + info.outbound_offset, info};
    // Sums of tokens over running requests are kept in 32 bits.
    require("max_running times max_context_tokens", u64{config.max_running} * state_->ring.info.max_context_tokens, 1,
            ~u32{0});
    bytes_ = divide_up(lay_out(*state_, nullptr), kPage) * kPage;
    memory_.reset(std::calloc(bytes_ + kPage, 1), std::free);
    if (!memory_) throw std::bad_alloc();
    arrays_ = reinterpret_cast<u8*>(divide_up(reinterpret_cast<std::uintptr_t>(memory_.get()), kPage) * kPage);
    lay_out(*state_, arrays_);
  }

  void start(u64 epoch) {
    require("epoch", epoch, 1, ~u64{0});
    timed([&](auto& context) { core::start(context, *state_, epoch, first_position_); });
  }

  void poll(u64 now_us) {
    timed([&](auto& context) { core::poll(context, *state_, now_us); });
  }

  bool plan(u64 now_us) {
    if (state_->step.in_flight) throw std::logic_error("plan: the last step is not committed");
    timed([&](auto& context) {
      const bool planned = core::plan(context, *state_, now_us);
      static_cast<void>(planned);  // state_->step says it for all threads
      publish(context, *state_);
    });
    return state_->step.in_flight != 0;
  }

  void commit(u64 now_us, const StepResult& result) {
    if (!state_->step.in_flight) throw std::logic_error("commit: no step was planned");
    for (u32 i = 0; i < state_->step.samples; ++i) {
      require("sampled token", static_cast<u32>(result.tokens[i]), 0, state_->ring.info.vocabulary_size - 1);
    }
    timed([&](auto& context) { core::commit(context, *state_, now_us, result); });
  }

  State& state() { return *state_; }
  const State& state() const { return *state_; }
  const std::shared_ptr<void>& memory() const { return memory_; }
  u8* arrays() const { return arrays_; }  // whole pages, so that they can be pinned
  u64 bytes() const { return bytes_; }
  u64 call_ns() const { return call_ns_; }  // of the last start, poll, plan or commit

 private:
  template <class F>
  void timed(F f) {
    const auto begin = std::chrono::steady_clock::now();
    if (threads_ == 1) {
      SerialContext context;
      f(context);
    } else {
      team_.run(f);
    }
    const auto spent = std::chrono::steady_clock::now() - begin;
    call_ns_ = static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  }

  static constexpr u64 kPage = 4096;

  const u64 first_position_;
  const u32 threads_;
  ThreadTeam team_;
  std::unique_ptr<State> state_;
  std::shared_ptr<void> memory_;
  u8* arrays_ = nullptr;
  u64 bytes_ = 0;
  u64 call_ns_ = 0;
};

}  // namespace blink::core

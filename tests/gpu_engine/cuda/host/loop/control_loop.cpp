// The whole control loop as a block of threads, beside a thread that runs its steps and an honest gateway, for a thread
// sanitizer: what two warps touch without a barrier between shows. Prints "ok" when every answer came out right.
//
// usage: control_loop REQUESTS
#define BLINK_LOOP_THREADS 64
#define BLINK_TRACE 0

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "block_threads.hpp"

using cudaGraphExec_t = void*;
enum Launch { cudaStreamGraphFireAndForget, cudaStreamGraphTailLaunch };
inline cudaGraphExec_t cudaGetCurrentGraphExec() { return nullptr; }
unsigned cudaGraphLaunch(cudaGraphExec_t graph, Launch launch);

#include "services/gpu_engine/cuda/control_loop/control_loop.cu"
#include "tests/gpu_engine/core/stress_ring.hpp"

using namespace blink::stress;
using namespace blink::cuda;
namespace ring = blink::ring;

namespace {

std::atomic<u64> steps_launched{0};
std::atomic<bool> launched_again{false}, ended{false};

// A step, as a model would do it: reads what the loop planned, writes what was sampled.
void run_step(Loop& loop, const StepAddresses& step) {
  const auto array = [](u64 address) { return reinterpret_cast<const i32*>(address); };
  const auto* sampling = reinterpret_cast<const blink::core::RowSampling*>(step.sampling);
  for (u32 i = 0; i < loop.counts.samples; ++i) {
    const i32 end = array(step.row_start)[array(step.sample_row)[i] + 1];
    const_cast<i32*>(loop.result.tokens)[i] = static_cast<i32>(
        next_token(static_cast<u32>(array(step.token_ids)[end - 1]), sampling[i].history_length, sampling[i].seed));
  }
  retire_step(&loop, nullptr);
}

void run_steps(Loop& loop, const StepAddresses& step) {
  for (u64 done = 0; !ended.load();) {
    if (steps_launched.load() == done) {
      std::this_thread::yield();
      continue;
    }
    run_step(loop, step);
    ++done;
  }
}

}  // namespace

unsigned cudaGraphLaunch(cudaGraphExec_t, Launch launch) {
  if (launch == cudaStreamGraphTailLaunch) {
    launched_again.store(true);
  } else {
    steps_launched.fetch_add(1);
  }
  return 0;
}

int main(int, char** arguments) {
  const ring::RingInfo info = make_info();
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, info.ring_bytes), std::free);
  u8* base = static_cast<u8*>(memory.get());
  std::memset(base, 0, info.ring_bytes);
  std::memcpy(base, &info, sizeof(info));
  const blink::core::RingView view{base, base + info.outbound_offset, info};

  LoopSettings settings{};
  settings.ring = reinterpret_cast<u64>(base);
  settings.outbound = reinterpret_cast<u64>(base + info.outbound_offset);
  settings.epoch = 1;
  settings.lease_us = u64{1} << 40;
  settings.page_size = 4;
  settings.page_count = 14;
  settings.max_running = 5;
  settings.max_batched_tokens = 12;
  settings.max_waiting = kLanes * kSlots;
  settings.priority_boost = 4;
  settings.prefix_cache = 1;
  settings.share_decoded = 1;
  settings.poll_us = 20'000;
  settings.launch_limit = 7;
  std::array<i32, 8> tokens;
  std::array<float, 8> logprobs{};
  std::array<i32, 8 * ring::kMaxTopLogprobs> top_tokens{};
  std::array<float, 8 * ring::kMaxTopLogprobs> top_logprobs{};
  const auto loop = std::make_unique<Loop>();
  StepAddresses step;
  const blink::core::StepResult result{tokens.data(), logprobs.data(), top_tokens.data(), top_logprobs.data()};
  lay_out_loop(loop.get(), settings, result, nullptr, &step);
  const std::unique_ptr<void, decltype(&std::free)> state(std::calloc(step.bytes + 64, 1), std::free);
  u8* arrays = reinterpret_cast<u8*>((reinterpret_cast<u64>(state.get()) + 63) / 64 * 64);
  lay_out_loop(loop.get(), settings, result, arrays, &step);

  u32 faults = 0;
  Gateway honest{view, 0};
  std::thread gpu([&] { run_steps(*loop, step); });
  std::thread gateway([&] {
    faults = honest_gateway(honest, static_cast<u32>(std::atoi(arguments[1])));
    store_release(const_cast<u64*>(&view.control()->command), static_cast<u64>(ring::Command::kStop));
  });
  const StepGraph graphs[] = {{{1, 2}, 1}, {{3, 4}, 12}};
  do {
    run_block([&] { control_loop(loop.get(), {graphs, 2, 0}, nullptr); });
  } while (launched_again.exchange(false));
  ended.store(true);
  gateway.join();
  gpu.join();

  const blink::core::Audit audit = blink::core::audit(loop->state);
  const bool empty = audit.live_requests == 0 && audit.free_pages == settings.page_count;
  std::printf("%s: %u faults, %llu steps in %llu executions\n", faults == 0 && empty ? "ok" : "wrong", faults,
              static_cast<unsigned long long>(loop->launched), static_cast<unsigned long long>(loop->executions));
  return faults == 0 && empty && loop->failure == 0 && loop->executions > 1 ? 0 : 1;
}

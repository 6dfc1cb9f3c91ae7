// The control loop: one thread block that serves the ring for as long as the engine lives.
//
// poll -> plan -> launch a step graph -> poll while it runs -> see it retire -> absorb -> plan the next ... The host
// takes no part. Between the end of one step and the start of the next lie only absorb, plan and the launch; what the
// gateways wait for is published right after the launch, because a release into mapped host memory waits for the bus.
// The kernel is itself a node of a device-launchable graph, and launches that graph again (tail launch) before it has
// used up the launches that CUDA allows one execution; all its state is then in device memory.
#include "services/gpu_engine/core/audit.hpp"
#include "services/gpu_engine/cuda/control_loop/block_context.cuh"
#include "services/gpu_engine/cuda/control_loop/instructions.cuh"
#include "services/gpu_engine/cuda/control_loop/loop.cuh"

namespace blink::cuda {

inline constexpr u32 kThreads = BLINK_LOOP_THREADS;

using Context = BlockContext<kThreads>;

__device__ inline u64 clock_us() { return clock_ns() / 1000; }

// Why the wait for a step ends, the weightiest last: a step that has retired is absorbed before the ring is polled.
inline constexpr u32 kAsleep = 0, kPollDue = 1, kRetired = 2;
inline constexpr u64 kDoorbellNs = 20'000;  // between two looks at the doorbells while a step runs

// The loop's variables in shared memory.
struct Shared {
  core::State state;
  u64 now_us;
  u32 wake;  // why the wait for a step ends, so far
  u32 due;
  u32 error;
};

class Runner {
 public:
  __device__ Runner(Loop& loop, const StepGraphs& graphs, StepTrace* trace, Shared& shared)
      : loop_(loop), graphs_(graphs), trace_(trace), shared_(shared), state_(shared.state) {}

  // Serves until STOP, a failure, or the launch limit.
  __device__ void run() {
    restore();
    while (true) {
      poll();
      bool changed = false;
      if (state_.step.in_flight != 0) {
        if (!wait_for_step()) continue;
        absorb();
        changed = true;
      }
      if (launches_ >= loop_.settings.launch_limit) return continue_in_next();
      if (core::plan(context_, state_, shared_.now_us)) {
        if (!launch()) return end(shared_.error);
        changed = true;
      }
      if (changed) core::publish(context_, state_);
      mark(step_, &StepTrace::published);
      if (state_.step.in_flight == 0) {
        if (stopped()) return end(0);
        rest();
      }
    }
  }

 private:
  __device__ void restore() {
    copy(&shared_.state, &loop_.state);
    context_.barrier();
    if (loop_.opened == 0) {
      core::start(context_, state_, loop_.settings.epoch, loop_.settings.first_position);
      core::leader(context_, [&] {
        loop_.opened = 1;
        core::set_engine_state(state_, static_cast<u64>(ring::EngineState::kReady));
      });
    }
    step_ = loop_.launched;
  }

  __device__ void copy(core::State* target, const core::State* source) {
    static_assert(sizeof(core::State) % sizeof(u64) == 0);
    core::strided(context_, sizeof(core::State) / sizeof(u64),
                  [&](u64 i) { reinterpret_cast<u64*>(target)[i] = reinterpret_cast<const u64*>(source)[i]; });
  }

  __device__ void poll() {
    core::leader(context_, [&] { shared_.now_us = clock_us(); });
    core::poll(context_, state_, shared_.now_us);
    next_poll_us_ = shared_.now_us + loop_.settings.poll_us;
    mark(step_, &StepTrace::polled);
  }

  // Whether the step has retired; false when a poll is due or would find something. One warp watches the step, another
  // looks at the doorbells now and then: the end of the step never waits for the bus longer than one look takes.
  __device__ bool wait_for_step() {
    core::leader(context_, [&] { shared_.wake = kAsleep; });
    if (threadIdx.x == 0) {
      u64 now_us;
      u32 reason;
      do {
        now_us = clock_us();
        reason = load_acquire_gpu(&loop_.retired) == step_ ? kRetired : now_us >= next_poll_us_ ? kPollDue : kAsleep;
      } while (wake(reason) == kAsleep);
      shared_.now_us = now_us;
    } else if (threadIdx.x / 32 == 1) {
      watch_doorbells();
    }
    context_.barrier();
    return shared_.wake == kRetired;
  }

  // Adds a reason, kAsleep for none, and returns the weightiest so far. Nothing else passes between warps without a
  // barrier, so these accesses alone are atomic.
  __device__ u32 wake(u32 reason) { return core::larger(atomicMax(&shared_.wake, reason), reason); }

  // One warp, until the wait ends or it ends the wait.
  __device__ void watch_doorbells() {
    const u32 lanes = state_.ring.info.lanes;
    const bool speaker = threadIdx.x % 32 == 0;
    u64 next_ns = clock_ns() + kDoorbellNs;
    while (__shfl_sync(0xFFFFFFFF, speaker ? wake(kAsleep) : kAsleep, 0) == kAsleep) {
      if (__shfl_sync(0xFFFFFFFF, clock_ns(), 0) < next_ns) continue;
      bool news = false;
      for (u32 lane = threadIdx.x % 32; lane < lanes; lane += 32) news |= core::has_news(state_, lane);
      if (__any_sync(0xFFFFFFFF, news)) {
        if (speaker) wake(kPollDue);
        return;
      }
      next_ns = __shfl_sync(0xFFFFFFFF, clock_ns(), 0) + kDoorbellNs;
    }
  }

  __device__ void absorb() {
    mark(step_ + 1, &StepTrace::retired);
    core::absorb(context_, state_, shared_.now_us, loop_.result);
    mark(step_ + 1, &StepTrace::absorbed);
  }

  // False when CUDA refuses the launch; `error` says why.
  __device__ bool launch() {
    ++step_;
    ++launches_;
    mark(step_, &StepTrace::planned);
    const core::Step& step = state_.step;
    const u32 first = step.tokens == step.rows ? 0 : graphs_.decode;
    const u32 bucket = core::find_first(context_, first, graphs_.count,
                                        [&](u32 i) { return graphs_.graphs[i].tokens >= step.tokens; });
    core::leader(context_, [&] {
      loop_.counts = {step.tokens, step.rows, step.samples};
      loop_.launched = step_;
      fence_gpu();
      const auto graph = reinterpret_cast<cudaGraphExec_t>(graphs_.graphs[bucket].instances[step_ % 2]);
      shared_.error = cudaGraphLaunch(graph, cudaStreamGraphFireAndForget);
    });
    mark(step_, &StepTrace::launched);
    return shared_.error == 0;
  }

  __device__ bool stopped() const {
    return state_.command == static_cast<u64>(ring::Command::kStop) && state_.running.count + state_.waiting.count == 0;
  }

  // Nothing to run: look at the doorbells alone until one has news or a poll is due.
  __device__ void rest() {
    const u32 lanes = state_.ring.info.lanes;
    while (true) {
      u64 news = 0;
      core::strided(context_, lanes, [&](u64 i) { news += core::has_news(state_, static_cast<u32>(i)); });
      if (core::sum(context_, news) != 0) return;
      core::leader(context_, [&] {
        __nanosleep(loop_.settings.idle_sleep_ns);
        shared_.due = clock_us() < next_poll_us_;
      });
      if (shared_.due == 0) return;
    }
  }

  __device__ void continue_in_next() {
    core::publish(context_, state_);
    save();
    core::leader(context_,
                 [&] { shared_.error = cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch); });
    if (shared_.error != 0) end(shared_.error);
  }

  __device__ void save() {
    copy(&loop_.state, &shared_.state);
    core::leader(context_, [&] {
      ++loop_.executions;
      __threadfence();
    });
  }

  __device__ void end(u32 failure) {
    core::publish(context_, state_);
    core::leader(context_, [&] {
      loop_.failure = failure;
      if (failure != 0) core::fail(state_, failure);
    });
    save();
  }

  __device__ void mark(u64 step, u64 StepTrace::* stage) {
#if BLINK_TRACE
    if (context_.thread() == 0) trace_[step % kTraceSteps].*stage = clock_ns();
#endif
  }

  Loop& loop_;
  const StepGraphs graphs_;
  StepTrace* const trace_;
  Shared& shared_;
  core::State& state_;
  Context context_;
  u64 step_ = 0;      // the last one launched
  u32 launches_ = 0;  // by this execution
  u64 next_poll_us_ = 0;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    control_loop(Loop* loop, StepGraphs graphs, StepTrace* trace) {
  __shared__ __align__(16) unsigned char memory[sizeof(Shared)];
  Runner(*loop, graphs, trace, *reinterpret_cast<Shared*>(memory)).run();
}

// The last node of every step graph.
extern "C" __global__ void retire_step(Loop* loop, StepTrace* trace) {
#if BLINK_TRACE
  trace[loop->launched % kTraceSteps].ended = clock_ns();
#endif
  store_release_gpu(&loop->retired, loop->launched);
}

// Divides `memory` (zeroed) into the core's arrays, and says where they are; a null `memory` only counts bytes.
// One thread, once, before the loop starts.
extern "C" __global__ void lay_out_loop(Loop* loop, LoopSettings settings, core::StepResult result, u8* memory,
                                        StepAddresses* addresses) {
  *loop = Loop{};
  loop->settings = settings;
  loop->result = result;
  core::State& state = loop->state;
  core::Config& config = state.config;
  config.page_size = settings.page_size;
  config.page_count = settings.page_count;
  config.max_running = settings.max_running;
  config.max_batched_tokens = settings.max_batched_tokens;
  config.max_waiting = settings.max_waiting;
  config.priority_boost = settings.priority_boost;
  config.lease_us = settings.lease_us;
  config.prefix_cache = settings.prefix_cache;
  config.share_decoded = settings.share_decoded;
  config.cache_seed = settings.cache_seed;
  config.eos_count = settings.eos_count;
  for (u32 i = 0; i < core::kMaxEosTokens; ++i) config.eos[i] = settings.eos[i];
  state.ring.base = reinterpret_cast<u8*>(settings.ring);
  state.ring.outbound_base = reinterpret_cast<u8*>(settings.outbound);
  state.ring.info = *reinterpret_cast<const ring::RingInfo*>(state.ring.base + ring::kRingInfoOffset);
  const u64 bytes = core::lay_out(state, memory);
  const auto address = [](const void* pointer) { return reinterpret_cast<u64>(pointer); };
  *addresses = {bytes,
                address(&loop->counts),
                address(state.step.token_ids),
                address(state.step.positions),
                address(state.step.row_start),
                address(state.step.kv_length),
                address(state.step.sequence),
                address(state.step.page_table),
                address(state.step.sample_row),
                address(state.step.sampling),
                address(state.history),
                state.pages_per_sequence};
}

// What the core still holds; one thread, after the loop's end.
extern "C" __global__ void audit_loop(const Loop* loop, core::Audit* audit) { *audit = core::audit(loop->state); }

extern "C" __device__ const u32 loop_bytes = sizeof(Loop);
extern "C" __device__ const u32 loop_threads = kThreads;
extern "C" __device__ const u32 loop_failure_offset = offsetof(Loop, failure);
extern "C" __device__ const u32 loop_executions_offset = offsetof(Loop, executions);

}  // namespace blink::cuda

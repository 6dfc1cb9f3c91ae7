// What host, control loop and step graphs share in device memory.
#pragma once

#include "services/gpu_engine/core/layout.hpp"
#include "services/gpu_engine/core/scheduler.hpp"

namespace blink::cuda {

using core::i32;
using core::u32;
using core::u64;
using core::u8;

// Given by the host when the engine starts; control_loop.py has the same fields in the same order.
struct LoopSettings {
  u64 ring;      // where the GPU sees it
  u64 outbound;  // the same of all lanes' outbound areas
  u64 epoch;
  u64 first_position;
  u64 lease_us;
  u64 cache_seed;
  u32 page_size;
  u32 page_count;
  u32 max_running;
  u32 max_batched_tokens;
  u32 max_waiting;
  u32 priority_boost;
  u32 prefix_cache;
  u32 share_decoded;
  u32 eos_count;
  u32 eos[core::kMaxEosTokens];
  u32 poll_us;        // between two polls while a step runs, or while idle
  u32 idle_sleep_ns;  // between two looks at the doorbells while idle
  u32 launch_limit;   // step launches of one execution of the loop, at most kMaxLaunches
};

// CUDA allows this many fire-and-forget launches from one execution of a graph.
inline constexpr u32 kMaxLaunches = 120;

struct StepCounts {
  u32 tokens;
  u32 rows;
  u32 samples;
};

// Where the step lies in device memory, for the kernels of the step graphs; control_loop.py has the same order.
struct StepAddresses {
  u64 bytes;  // of the core's arrays together
  u64 counts;
  u64 token_ids;
  u64 positions;
  u64 row_start;
  u64 kv_length;
  u64 sequence;
  u64 page_table;
  u64 sample_row;
  u64 sampling;
  u64 history;
  u64 pages_per_sequence;
};

// One bucket of the graph cache: the smallest that holds a step's tokens runs it. Rising token counts, first those of
// graphs for steps in which every row is one token, then those for all.
struct StepGraph {
  u64 instances[2];  // cudaGraphExec_t, used in turn: one can't be launched again before it has wholly retired
  u64 tokens;
};

// Nanoseconds of %globaltimer at each stage of one step, kept when the loop is compiled with BLINK_TRACE.
struct StepTrace {
  u64 retired;    // the loop has seen the end of the step before
  u64 absorbed;   // its result is in
  u64 planned;    // this step is planned
  u64 launched;   // and launched
  u64 published;  // the gateways can see the result
  u64 polled;     // the first poll while this step runs is over
  u64 ended;      // this step's retire_step has begun
};
inline constexpr u32 kTraceSteps = 4096;

// control_loop.py passes it by value.
struct StepGraphs {
  const StepGraph* graphs;
  u32 count;
  u32 decode;  // of them for decoding rows alone
};

struct Loop {
  core::State state;  // while the loop is not running: it works on a copy in shared memory
  LoopSettings settings;
  core::StepResult result;
  StepCounts counts;  // of the launched step
  u64 opened;         // the ring is open: this is not the first execution
  u64 launched;       // steps launched
  u64 retired;        // the last step whose kernels have all ended; written by retire_step
  u64 executions;     // of the loop
  u64 failure;        // cudaError_t that ended the loop
};

}  // namespace blink::cuda

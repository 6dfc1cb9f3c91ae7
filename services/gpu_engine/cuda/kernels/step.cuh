// The step as kernels see it: docs/architecture.md, "The engine's step". Everything lies in device memory, the counts
// too, so a graph captured for a bucket of tokens serves every step that fits; what lies beyond the counts is skipped.
#pragma once

#include "bf16.cuh"

namespace blink {

struct StepCounts {
  u32 tokens;
  u32 rows;
  u32 samples;
};

// Passed by value; executor.py's StepArrays fills it.
struct Step {
  const StepCounts* counts;
  const i32* token_ids;   // [tokens]
  const i32* positions;   // [tokens]
  const i32* row_start;   // [rows + 1]
  const i32* kv_length;   // [rows]
  const i32* sequence;    // [rows]
  const i32* page_table;  // [max_running, pages_per_sequence]
  const i32* sample_row;  // [samples]
  const i32* token_row;   // [tokens], filled by plan_attention
  u32 pages_per_sequence;
};

}  // namespace blink

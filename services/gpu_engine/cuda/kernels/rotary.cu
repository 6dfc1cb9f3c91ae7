// Norms of heads, rotary embedding of the fused projection's Q and K, and the write of K and V into their pages.
//
// One block a token, kJobs threads a head (rotary.cuh). Q is changed in place, into operands of attention; K and V
// leave for the page that the page table gives the token's position (kv_cache.cuh). Without norms both weights are
// null. `table` [context, kHalf] holds (cos, sin), computed on the host in float64: a product position x frequency in
// fp32 would be off by 1e-2 radians at 131,072 tokens. Bound by memory (78% of an H200's bandwidth at 2,048 tokens), by
// launch latency at decode.
#include "dependent_launch.cuh"
#include "rotary.cuh"
#include "step.cuh"

namespace blink {

inline constexpr u32 kAllJobs = (kHeads + 2 * kKvHeads) * kJobs;

extern "C" __global__ void __launch_bounds__(256)
    rotary(Step step, bf16* qkv, KvElement* layer_pages, const float2* table, const bf16* query_norm,
           const bf16* key_norm, float eps, KvScales scales) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 token = blockIdx.x;
  if (token >= step.counts->tokens) return;
  bf16* fused = qkv + static_cast<u64>(token) * kQkvWidth;
  const u32 position = step.positions[token];
  const float2* turns = table + static_cast<u64>(position) * kHalf;
  const i32 line = step.sequence[step.token_row[token]];
  const u32 page = step.page_table[static_cast<u64>(line) * step.pages_per_sequence + position / kPageSize];
  KvElement* in_page = layer_pages + position % kPageSize * kHeadDim;

  for (u32 i = threadIdx.x; i < kAllJobs; i += blockDim.x) {
    const u32 head = i / kJobs, job = i % kJobs;
    bf16* source = fused + head * kHeadDim;
    if (head < kHeads) {
      rotate_head(StoredHead{source}, reinterpret_cast<Operand*>(source), job, query_norm, turns, eps);
    } else if (head < kHeads + kKvHeads) {
      rotate_head(StoredHead{source}, in_page + page_offset(page, head - kHeads), job, key_norm, turns, eps,
                  scales.key);
    } else {
      copy_head(StoredHead{source}, in_page + page_offset(page, head - kHeads - kKvHeads) + kPageValues, job,
                scales.value);
    }
  }
}

}  // namespace blink

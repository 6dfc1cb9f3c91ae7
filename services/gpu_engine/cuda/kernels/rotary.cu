// Rotary embedding of the fused projection's Q and K (arXiv 2104.09864), and the write of K and V into their pages.
//
// One block a token. A thread takes eight rotary pairs (i, i + head_dim / 2) of a query or key head, or eight elements
// of a value head. Q is rotated in place; K and V leave for the page that the page table gives the token's position.
// `table` [context, head_dim / 2] holds (cos, sin), computed on the host in float64: a product position x frequency in
// fp32 would be off by 1e-2 radians at 131,072 tokens. Bound by memory (78% of an H200's
// bandwidth at 2,048 tokens), by launch latency at decode.
#include "geometry.cuh"
#include "step.cuh"

namespace blink {

inline constexpr u32 kHalf = kHeadDim / 2;
inline constexpr u32 kPairJobs = kHalf / 8;      // of a query or key head
inline constexpr u32 kValueJobs = kHeadDim / 8;  // of a value head
inline constexpr u32 kQueryJobs = kHeads * kPairJobs;
inline constexpr u32 kKeyJobs = kKvHeads * kPairJobs;
inline constexpr u32 kJobs = kQueryJobs + kKeyJobs + kKvHeads * kValueJobs;

__device__ inline void rotate(const bf16* source, bf16* target, const float2* turn) {
  Eight low = load(source), high = load(source + kHalf);
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    const float x = low.value[k], y = high.value[k];
    low.value[k] = x * turn[k].x - y * turn[k].y;
    high.value[k] = y * turn[k].x + x * turn[k].y;
  }
  store(target, low);
  store(target + kHalf, high);
}

extern "C" __global__ void __launch_bounds__(256) rotary(Step step, bf16* qkv, bf16* layer_pages, const float2* table) {
  const u32 token = blockIdx.x;
  if (token >= step.counts->tokens) return;
  bf16* fused = qkv + static_cast<u64>(token) * kQkvWidth;
  const u32 position = step.positions[token];
  const float2* turns = table + static_cast<u64>(position) * kHalf;
  const i32 line = step.sequence[step.token_row[token]];
  const u32 page = step.page_table[static_cast<u64>(line) * step.pages_per_sequence + position / kPageSize];
  const u32 in_page = position % kPageSize * kHeadDim;

  for (u32 job = threadIdx.x; job < kJobs; job += blockDim.x) {
    if (job < kQueryJobs) {
      const u32 i = job % kPairJobs * 8;
      bf16* head = fused + job / kPairJobs * kHeadDim + i;
      rotate(head, head, turns + i);
    } else if (job < kQueryJobs + kKeyJobs) {
      const u32 key = job - kQueryJobs, head = key / kPairJobs, i = key % kPairJobs * 8;
      rotate(fused + kQueryWidth + head * kHeadDim + i, layer_pages + page_offset(page, head) + in_page + i, turns + i);
    } else {
      const u32 value = job - kQueryJobs - kKeyJobs, head = value / kValueJobs, i = value % kValueJobs * 8;
      const bf16* source = fused + kQueryWidth + (kKvHeads + head) * kHeadDim + i;
      store_raw(layer_pages + page_offset(page, head) + kPageValues + in_page + i, load_raw(source));
    }
  }
}

}  // namespace blink

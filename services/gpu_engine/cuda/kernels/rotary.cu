// Norms of each head's query and key (where the model has them, arXiv 2505.09388), rotary embedding of the fused
// projection's Q and K (arXiv 2104.09864), and the write of K and V into their pages.
//
// One block a token. A thread takes sixteen elements of a head as two runs of eight: of a query or key head eight
// rotary pairs (i, i + kHalf), or, beyond the rotated dimensions, elements that stay; of a value head any. The kJobs
// threads of a head are neighbouring lanes, so a head's sum of squares is a few shuffles, always in one order. Q is
// changed in place; K and V leave for the page that the page table gives the token's position. Without norms both
// weights are null. `table` [context, kHalf] holds (cos, sin), computed on the host in float64: a product position x
// frequency in fp32 would be off by 1e-2 radians at 131,072 tokens. Bound by memory (78% of an H200's bandwidth at
// 2,048 tokens), by launch latency at decode.
#include "dependent_launch.cuh"
#include "geometry.cuh"
#include "step.cuh"

namespace blink {

inline constexpr u32 kHalf = kRotaryDim / 2;
inline constexpr u32 kJobs = kHeadDim / 16;      // threads of a head
inline constexpr u32 kTurned = kRotaryDim / 16;  // of them rotate
inline constexpr u32 kAllJobs = (kHeads + 2 * kKvHeads) * kJobs;

static_assert(kRotaryDim % 16 == 0 && kRotaryDim <= kHeadDim, "eight rotary pairs a thread");
static_assert((kJobs & (kJobs - 1)) == 0 && kJobs <= 32, "a head's threads are part of a warp");

struct Sixteen {
  Eight low, high;
};

// Divides a head, of which this thread has sixteen elements at `low` and `high`, by its root mean square.
__device__ inline void norm_head(Sixteen& x, const bf16* weight, u32 low, u32 high, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (u32 k = 0; k < 8; ++k) squares += x.low.value[k] * x.low.value[k] + x.high.value[k] * x.high.value[k];
  const u32 lane = threadIdx.x % 32, mask = 0xFFFFFFFFu >> (32 - kJobs) << lane / kJobs * kJobs;
#pragma unroll
  for (u32 distance = 1; distance < kJobs; distance *= 2) squares += __shfl_xor_sync(mask, squares, distance);
  const float scale = rsqrtf(squares / kHeadDim + eps);
  const Eight low_weight = load(weight + low), high_weight = load(weight + high);
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    x.low.value[k] *= scale * low_weight.value[k];
    x.high.value[k] *= scale * high_weight.value[k];
  }
}

__device__ inline void turn(Sixteen& x, const float2* turns) {
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    const float a = x.low.value[k], b = x.high.value[k];
    x.low.value[k] = a * turns[k].x - b * turns[k].y;
    x.high.value[k] = b * turns[k].x + a * turns[k].y;
  }
}

extern "C" __global__ void __launch_bounds__(256) rotary(Step step, bf16* qkv, bf16* layer_pages, const float2* table,
                                                         const bf16* query_norm, const bf16* key_norm, float eps) {
  let_successor_begin();
  wait_for_predecessor();
  const u32 token = blockIdx.x;
  if (token >= step.counts->tokens) return;
  bf16* fused = qkv + static_cast<u64>(token) * kQkvWidth;
  const u32 position = step.positions[token];
  const float2* turns = table + static_cast<u64>(position) * kHalf;
  const i32 line = step.sequence[step.token_row[token]];
  const u32 page = step.page_table[static_cast<u64>(line) * step.pages_per_sequence + position / kPageSize];
  bf16* in_page = layer_pages + position % kPageSize * kHeadDim;

  for (u32 job = threadIdx.x; job < kAllJobs; job += blockDim.x) {
    const u32 head = job / kJobs, part = job % kJobs;
    const bool turned = part < kTurned;
    const u32 low = turned ? part * 8 : kRotaryDim + (part - kTurned) * 16, high = low + (turned ? kHalf : 8);
    bf16* source = fused + head * kHeadDim;
    if (head >= kHeads + kKvHeads) {
      bf16* target = in_page + page_offset(page, head - kHeads - kKvHeads) + kPageValues;
      store_raw(target + low, load_raw(source + low));
      store_raw(target + high, load_raw(source + high));
      continue;
    }
    Sixteen x = {load(source + low), load(source + high)};
    const bool is_query = head < kHeads;
    if (query_norm) norm_head(x, is_query ? query_norm : key_norm, low, high, eps);
    if (turned) turn(x, turns + low);
    bf16* target = is_query ? source : in_page + page_offset(page, head - kHeads);
    store(target + low, x.low);
    store(target + high, x.high);
  }
}

}  // namespace blink

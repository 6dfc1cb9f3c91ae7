// The model's shape as constants: the compiler defines BLINK_*, one build for each geometry.
#pragma once

#include "bf16.cuh"

namespace blink {

inline constexpr u32 kHidden = BLINK_HIDDEN;
inline constexpr u32 kFfn = BLINK_FFN;
inline constexpr u32 kHeads = BLINK_HEADS;
inline constexpr u32 kKvHeads = BLINK_KV_HEADS;
inline constexpr u32 kHeadDim = BLINK_HEAD_DIM;
inline constexpr u32 kRotaryDim = BLINK_ROTARY_DIM;  // dimensions of a head that are rotated, from the first
inline constexpr u32 kPageSize = BLINK_PAGE_SIZE;    // tokens of a KV page

inline constexpr u32 kGroup = kHeads / kKvHeads;  // query heads that share one KV head
inline constexpr u32 kQueryWidth = kHeads * kHeadDim;
inline constexpr u32 kQkvWidth = (kHeads + 2 * kKvHeads) * kHeadDim;  // a row of the fused projection: Q | K | V

static_assert(kHeads % kKvHeads == 0 && kGroup >= 1 && kGroup <= 8, "1 to 8 query heads a KV head");
static_assert(kHeadDim == 64 || kHeadDim == 128, "head sizes 64 and 128");
static_assert(kPageSize >= 16 && (kPageSize & (kPageSize - 1)) == 0, "a page is a power of two, at least 16 tokens");
static_assert(kHidden % 8 == 0 && kFfn % 8 == 0, "rows are read 8 elements at a time");

}  // namespace blink

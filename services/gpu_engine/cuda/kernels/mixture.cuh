// What the kernels of a mixture-of-experts layer share: its shape, and the work list that mixture_route.cu builds and
// mixture_gemm.cu and mixture_combine.cu read. All of it lies in device memory, so one graph serves every routing.
#pragma once

#include "geometry.cuh"

namespace blink {

inline constexpr u32 kExperts = BLINK_EXPERTS;
inline constexpr u32 kChosen = BLINK_CHOSEN;  // experts of a token
inline constexpr u32 kExpertFfn = BLINK_EXPERT_FFN;

static_assert(kExperts % 16 == 0 && kExperts <= 256, "the router's experts come sixteen at a time");
static_assert(kChosen <= kExperts && kChosen <= 32, "a warp keeps a token's experts");
static_assert(kHidden % 256 == 0 && kExpertFfn % 64 == 0, "products come in whole tiles");

// Consecutive rows of the grouped order that one expert computes together.
struct alignas(16) MixtureItem {
  u32 expert;
  u32 first;  // row
  u32 rows;   // may be 0
  u32 unused;
};

// A (token, choice) pair is a row of the grouped order: rows of one expert are consecutive, in the order of the tokens.
struct MixtureWork {
  float* logits;       // [max_tokens, kExperts]
  i32* chosen;         // [max_tokens, kChosen] experts, the largest weight first
  float* weights;      // [max_tokens, kChosen]
  i32* places;         // [max_tokens, kChosen] row of each pair
  i32* row_token;      // [max_tokens x kChosen] token of each row
  MixtureItem* items;  // [min(kExperts, rows) + rows / rows of an item]
  u32* item_count;
  u32* arrivals;  // [1 + max_tokens / 16] token tiles that are routed; blocks of each tile that are done; 0 in between
};

}  // namespace blink

// Attention over a paged KV cache, one query token and one KV head at a time.
//
// Two passes over the pages: scores (sixteen positions in the lanes), then the weighted sum of values (sixteen
// dimensions in the lanes). Each head's sums run over ascending dimensions and positions, so a token's result depends
// only on its own context: not on the batch, on how a prompt was cut into chunks, or on which pages hold it.
#pragma once

#include "services/gpu_engine/cpu/kernel_table.hpp"
#include "services/gpu_engine/cpu/simd.hpp"

namespace blink::cpu::BLINK_ISA {

// scores[h][position] for whole chunks of sixteen positions of one page.
template <int H>
BLINK_INLINE void score_page(const float* keys, int head_dim, int page_size, int positions, const float* queries,
                             float scale, float* scores, size_t scores_stride) {
  for (int chunk = 0; chunk < positions; chunk += kLanes) {
    Lanes sum[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) sum[h] = splat(0);
    const float* column = keys + chunk;
    for (int d = 0; d < head_dim; ++d, column += page_size) {
      const Lanes key = load(column);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) sum[h] = multiply_add(key, splat(queries[h * head_dim + d]), sum[h]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) store(scores + h * scores_stride + chunk, multiply(sum[h], splat(scale)));
  }
}

// Turns scores into unnormalized probabilities, zero from `length` to `padded`; returns their sum.
BLINK_INLINE float soften(float* scores, int length, int padded) {
  for (int i = length; i < padded; ++i) scores[i] = kMinusInfinity;
  Lanes best = load(scores);
  for (int i = kLanes; i < padded; i += kLanes) best = larger(load(scores + i), best);
  const Lanes shift = splat(-largest_of(best));
  Lanes sum = splat(0);
  for (int i = 0; i < padded; i += kLanes) {
    Lanes p = load(scores + i);
    for (int part = 0; part < kParts; ++part) p.part[part] = p.part[part] + shift.part[part];
    p = exponential(p);
    if (i + kLanes > length) {
      store(scores + i, p);
      for (int j = length - i; j < kLanes; ++j) scores[i + j] = 0;
      p = load(scores + i);
    }
    store(scores + i, p);
    for (int part = 0; part < kParts; ++part) sum.part[part] = sum.part[part] + p.part[part];
  }
  return sum_of(sum);
}

// Adds positions of one page to sum[h][j], dimensions 16 j to 16 j + 15.
template <int H, int D>
BLINK_INLINE void weigh_page(const float* values, int head_dim, int positions, const float* probabilities,
                             size_t stride, Lanes (&sum)[H][D]) {
  for (int position = 0; position < positions; ++position, values += head_dim) {
    Lanes value[D];
#pragma GCC unroll 4
    for (int j = 0; j < D; ++j) value[j] = load(values + j * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const Lanes p = splat(probabilities[h * stride + position]);
#pragma GCC unroll 4
      for (int j = 0; j < D; ++j) sum[h][j] = multiply_add(value[j], p, sum[h][j]);
    }
  }
}

template <int H, int D>
static void weigh(const KvCache& cache, const int32_t* pages, int length, int kv_head, const float* probabilities,
                  size_t stride, const float* totals, int dimension, float* out) {
  Lanes sum[H][D];
  for (int h = 0; h < H; ++h)
    for (int j = 0; j < D; ++j) sum[h][j] = splat(0);
  for (int start = 0; start < length; start += cache.page_size) {
    const float* values = cache.values + cache.offset(pages[start / cache.page_size], kv_head) + dimension;
    const int positions = length - start < cache.page_size ? length - start : cache.page_size;
    weigh_page<H, D>(values, cache.head_dim, positions, probabilities + start, stride, sum);
  }
  for (int h = 0; h < H; ++h)
    for (int j = 0; j < D; ++j)
      store(out + h * cache.head_dim + dimension + j * kLanes, multiply(sum[h][j], splat(1.0f / totals[h])));
}

template <int H>
static void attend_heads(const KvCache& cache, const int32_t* pages, int length, int kv_head, const float* queries,
                         float* scratch, float* out) {
  const int whole_pages = (length + cache.page_size - 1) / cache.page_size;
  const size_t stride = static_cast<size_t>(whole_pages) * cache.page_size;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(cache.head_dim));
  const int padded = (length + kLanes - 1) / kLanes * kLanes;
  for (int page = 0; page < whole_pages; ++page) {
    const int start = page * cache.page_size;
    const int positions = padded - start < cache.page_size ? padded - start : cache.page_size;
    score_page<H>(cache.keys + cache.offset(pages[page], kv_head), cache.head_dim, cache.page_size, positions, queries,
                  scale, scratch + start, stride);
  }
  float totals[H];
  for (int h = 0; h < H; ++h) totals[h] = soften(scratch + h * stride, length, padded);
  int dimension = 0;
  constexpr int D = kParts > 1 ? 1 : 4;
  for (; dimension + D * kLanes <= cache.head_dim; dimension += D * kLanes)
    weigh<H, D>(cache, pages, length, kv_head, scratch, stride, totals, dimension, out);
  for (; dimension < cache.head_dim; dimension += kLanes)
    weigh<H, 1>(cache, pages, length, kv_head, scratch, stride, totals, dimension, out);
}

static void attend(const KvCache& cache, const int32_t* pages, int length, int kv_head, const float* queries, int heads,
                   float* scratch, float* out) {
  for (int h = 0; h < heads;) {
    const float* q = queries + h * cache.head_dim;
    float* o = out + h * cache.head_dim;
    switch (heads - h) {
      case 1:
        attend_heads<1>(cache, pages, length, kv_head, q, scratch, o);
        h += 1;
        break;
      case 2:
        attend_heads<2>(cache, pages, length, kv_head, q, scratch, o);
        h += 2;
        break;
      case 3:
        attend_heads<3>(cache, pages, length, kv_head, q, scratch, o);
        h += 3;
        break;
      default:
        attend_heads<4>(cache, pages, length, kv_head, q, scratch, o);
        h += 4;
    }
  }
}

}  // namespace blink::cpu::BLINK_ISA

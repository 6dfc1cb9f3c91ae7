// Attention of one query token over one split of its keys, for the query heads of one KV head.
//
// The warpgroup's four warps take groups of 16 keys in turn, each at its own pace: a warp copies its groups' keys and
// values asynchronously into a ring of its own in shared memory. Tensor-core fragments come from
// there in 16-byte loads, without a transpose: the dot product over a head does not care in which order it is summed,
// so lane c of four takes 8 consecutive dimensions of every 32 of both Q and K; and of V the columns of an output tile
// may be any 8 dimensions, so lane group g takes 8 consecutive of every 64. Of pages in FP8 16 of 64 and, for heads of
// 128, 16 of 128, which become operands in registers. Online softmax (arXiv 2205.14135) in base 2.
//
// Warps meet in shared memory; then the splits of a row meet in global memory, where the last warpgroup to arrive adds
// them in order: no float depends on who came first. Bound by memory: 4 bytes a key, KV head and dimension, 2 in
// FP8; in bf16 75% of an H200's bandwidth at 256 rows of 192 keys.
#pragma once

#include "attention_work.cuh"
#include "kv_cache.cuh"
#include "mma.cuh"
#include "step.cuh"
#include "warpgroup.cuh"

namespace blink {

inline constexpr u32 kGroupKeys = 16;
inline constexpr u32 kKeyPieces = kHeadDim * sizeof(KvElement) / 16;  // 16-byte pieces of a key in its page

// kStages: groups on their way at once, of each warp.
template <u32 kStages>
struct DecodeRing {
  alignas(128) KvElement keys[kStages][kGroupKeys * kHeadDim];
  alignas(128) KvElement values[kStages][kGroupKeys * kHeadDim];
};

// Where a warp works.
template <u32 kStages>
union DecodeArea {
  DecodeRing<kStages> ring;
  float out[kGroup][kHeadDim];  // after the ring has been read
};

// What the warps have in common.
struct DecodeShared {
  float2 ml[kWarps][kGroup];         // (maximum in log2 units, sum)
  float weight[kGroup][kMaxSplits];  // of the row's splits
  u32 last;
};

// Where a piece lies, so that the reads below are free of bank conflicts: two keys by four pieces (K), or four even
// keys by two pieces (V), in one go. Keys of four pieces lie two in a row of all banks.
__device__ inline u32 key_piece(u32 key, u32 piece) {
  return kKeyPieces == 4 ? key * kKeyPieces + piece : key * kKeyPieces + (piece ^ (key % 2 * 4));
}
__device__ inline u32 value_piece(u32 key, u32 piece) {
  return kKeyPieces == 4 ? (key * kKeyPieces + piece) ^ (key & 6) : key * kKeyPieces + (piece ^ (key & 6));
}

// The values of a key that a lane takes at once: kRun columns, one of each output tile.
inline constexpr u32 kRun = kFp8Cache ? kHeadDim / 8 : 8, kRunBytes = kRun * sizeof(KvElement);

struct alignas(kRunBytes) ValueRun {
  u32 words[kRunBytes / 4];

  __device__ static ValueRun read(const KvElement* values, u32 key, u32 run) {
    constexpr u32 kRuns = 16 / kRunBytes;  // of a piece
    return reinterpret_cast<const ValueRun*>(values)[value_piece(key, run / kRuns) * kRuns + run % kRuns];
  }

  __device__ void clear() {
#pragma unroll
    for (u32& word : words) word = 0;
  }
};

// Two keys' values of column `i` of their runs, as operands.
__device__ inline u32 value_pair(const ValueRun& first, const ValueRun& second, u32 i) {
  if constexpr (kFp8Cache) {
    const uint2 both =
        halves_of_e4m3(__byte_perm(first.words[i / 4], second.words[i / 4], i % 4 < 2 ? 0x5140 : 0x7362));
    return i % 2 ? both.y : both.x;
  } else {
    return __byte_perm(first.words[i / 2], second.words[i / 2], i % 2 ? 0x7632 : 0x5410);
  }
}

struct IsMade {
  __device__ void operator()() const {}
};

// A row's newest key and value. They are in their page with the rest, and the queries are there; or make() leaves them
// in shared memory, and the queries, by all threads of the split while older keys are on their way. Null if they are
// in the page, or of another split.
template <class Make = IsMade>
struct Newest {
  Make make = {};
  const KvElement *key = nullptr, *value = nullptr;
};

// Puts a key and its value where copy_group would have put them, by a warp.
template <u32 kStages>
__device__ inline void place_key(DecodeRing<kStages>& ring, u32 stage, u32 key, const KvElement* keys,
                                 const KvElement* values) {
  const u32 piece = threadIdx.x % 32;
  if (piece >= kKeyPieces) return;
  reinterpret_cast<uint4*>(ring.keys[stage])[key_piece(key, piece)] = reinterpret_cast<const uint4*>(keys)[piece];
  reinterpret_cast<uint4*>(ring.values[stage])[value_piece(key, piece)] = reinterpret_cast<const uint4*>(values)[piece];
}

template <u32 kStages>
__device__ inline void copy_group(DecodeRing<kStages>& ring, u32 stage, const KvElement* source) {
  const u32 keys = shared_address(ring.keys[stage]), values = shared_address(ring.values[stage]);
  const u32 lane = threadIdx.x % 32, first = lane / kKeyPieces, piece = lane % kKeyPieces;
  constexpr u32 kElements = 16 / sizeof(KvElement);  // of a piece
#pragma unroll
  for (u32 i = 0; i < kGroupKeys * kKeyPieces / 32; ++i) {
    const u32 key = first + i * (32 / kKeyPieces);
    copy_async(keys + key_piece(key, piece) * 16, source + (lane + i * 32) * kElements, true);
    copy_async(values + value_piece(key, piece) * 16, source + kPageValues + (lane + i * 32) * kElements, true);
  }
}

// One warp's share of the keys from `begin` to `end`: leaves its sums in `area` and `shared`.
template <u32 kStages, class Make>
__device__ inline void decode_warp(DecodeArea<kStages>& area, DecodeShared& shared, const Operand* query,
                                   const KvElement* pages, const i32* page_line, u32 kv_head, u32 begin, u32 end,
                                   float scale, const Newest<Make>& newest) {
  const u32 warp = warp_in_group(), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 all = (end - begin + kGroupKeys - 1) / kGroupKeys, groups = (all + kWarps - 1 - warp) / kWarps;
  DecodeRing<kStages>& ring = area.ring;
  const auto first_key = [&](u32 group) { return begin + (warp + group * kWarps) * kGroupKeys; };

  u32 page_of_lane = 0;
  const auto fetch = [&](u32 group) {  // page ids come 32 groups at a time, one a lane
    if (group < groups) {
      if (group % 32 == 0 && group + lane < groups) page_of_lane = page_line[first_key(group + lane) / kPageSize];
      const u32 page = __shfl_sync(0xFFFFFFFFu, page_of_lane, group % 32);
      copy_group(ring, group % kStages, pages + page_offset(page, kv_head) + first_key(group) % kPageSize * kHeadDim);
    }
    commit_copies();
  };
#pragma unroll 2
  for (u32 group = 0; group < kStages; ++group) fetch(group);
  newest.make();

  uint4 q[kHeadDim / 32];
#pragma unroll
  for (u32 s = 0; s < kHeadDim / 32; ++s) {
    // As `widen` has a key's.
    const Operand* source = query + g * kHeadDim + s / kPacked * kPacked * 32 + c * kPacked * 8 + s % kPacked * 8;
    q[s] = g < kGroup ? load_raw(source) : make_uint4(0, 0, 0, 0);
  }
  float out[kHeadDim / 8][2] = {};
  float maximum = minus_infinity(), sum = 0.0f;

  for (u32 group = 0; group < groups; ++group) {
    wait_copies<kStages - 1>();
    __syncwarp();
    const u32 valid = end - first_key(group);  // keys of this group and beyond
    if (newest.key && valid <= kGroupKeys) {
      place_key(ring, group % kStages, valid - 1, newest.key, newest.value);
      __syncwarp();
    }
    const uint4* keys = reinterpret_cast<const uint4*>(ring.keys[group % kStages]);
    const KvElement* values = ring.values[group % kStages];
    float score[2][2] = {};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 s = 0; s < kHeadDim / 32; s += kPacked) {
        uint4 k[kPacked];
        widen(keys[key_piece(half * 8 + g, s / kPacked * 4 + c)], k);
#pragma unroll
        for (u32 i = 0; i < kPacked; ++i) {
          mma_low<Operand>(score[half], q[s + i].x, q[s + i].y, k[i].x, k[i].y);
          mma_low<Operand>(score[half], q[s + i].z, q[s + i].w, k[i].z, k[i].w);
        }
      }
    }

    float top = maximum;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 k = 0; k < 2; ++k) {
        score[half][k] = half * 8 + 2 * c + k < valid ? score[half][k] * scale : minus_infinity();
        top = fmaxf(top, score[half][k]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
    const float rescale = power_of_two(maximum - top);
    maximum = top;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 k = 0; k < 2; ++k) score[half][k] = power_of_two(score[half][k] - (top - kWeightExponent));
    }
    sum = sum * rescale + ((score[0][0] + score[0][1]) + (score[1][0] + score[1][1]));
    const u32 a0 = pack_operands(score[0][0], score[0][1]), a2 = pack_operands(score[1][0], score[1][1]);

#pragma unroll
    for (u32 s = 0; s < kHeadDim / 8 / kRun; ++s) {
      ValueRun v[4];
#pragma unroll
      for (u32 t = 0; t < 4; ++t) {
        const u32 key = t / 2 * 8 + 2 * c + t % 2;
        v[t] = ValueRun::read(values, key, s * 8 + g);
        // What lies behind the sequence's end in its last page was never written: 0 x NaN must not reach the sum.
        if (key >= valid) v[t].clear();
      }
#pragma unroll
      for (u32 i = 0; i < kRun; ++i) {
        const u32 b0 = value_pair(v[0], v[1], i), b1 = value_pair(v[2], v[3], i);
        float (&o)[2] = out[s * kRun + i];
        o[0] *= rescale;
        o[1] *= rescale;
        mma_low<Operand>(o, a0, a2, b0, b1);
      }
    }
    __syncwarp();
    fetch(group + kStages);
  }
  wait_copies<0>();
  __syncwarp();

  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  if (g < kGroup) {
    if (c == 0) shared.ml[warp][g] = make_float2(maximum, sum);
    float* row = area.out[g];
#pragma unroll
    for (u32 s = 0; s < kHeadDim / 8 / kRun; ++s) {
#pragma unroll
      for (u32 i = 0; i < kRun; ++i) {  // column 2c + k of tile i holds dimension (2c + k) * kRun + i
        row[s * 8 * kRun + 2 * kRun * c + i] = out[s * kRun + i][0];
        row[s * 8 * kRun + 2 * kRun * c + kRun + i] = out[s * kRun + i][1];
      }
    }
  }
}

// Adds the row's splits in order and writes the result; run by the warpgroup that finished last. What it waits for is
// two trips to memory, whatever the number of splits: their maxima and sums, then 8 splits' values at a time.
__device__ inline void add_splits(DecodeShared& shared, const WorkList& work, u32 partial, u32 splits, u32 kv_head,
                                  bf16* out, const AttentionScales& scales) {
  const u64 first = static_cast<u64>(partial) * kHeads + kv_head * kGroup;
  const u32 lane = threadIdx.x % 32;
  for (u32 head = warp_in_group(); head < kGroup; head += kWarps) {
    constexpr u32 kOfLane = kMaxSplits / 32;
    float2 ml[kOfLane];
    float maximum = minus_infinity(), sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kOfLane; ++i) {
      const u32 split = i * 32 + lane;
      ml[i] = split < splits ? __ldcg(&work.partial_ml[first + split * kHeads + head])
                             : make_float2(minus_infinity(), 0.0f);
      maximum = fmaxf(maximum, ml[i].x);
    }
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, distance));
    }
#pragma unroll
    for (u32 i = 0; i < kOfLane; ++i) {
      ml[i].x = power_of_two(ml[i].x - maximum);
      sum += ml[i].x * ml[i].y;
    }
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
#pragma unroll
    for (u32 i = 0; i < kOfLane; ++i) shared.weight[head][i * 32 + lane] = ml[i].x / scales.divisor(sum);
  }
  synchronize_warpgroup();
  constexpr u32 kQuads = kHeadDim / 4, kAtOnce = 8;
  for (u32 i = thread_in_group(); i < kGroup * kQuads; i += kWarpgroup) {
    const float4* source = reinterpret_cast<const float4*>(work.partial_out + first * kHeadDim) + i;
    const float* weight = shared.weight[i / kQuads];
    float4 sum = {};
    for (u32 s = 0; s < splits; s += kAtOnce) {
      float4 part[kAtOnce];
#pragma unroll
      for (u32 k = 0; k < kAtOnce; ++k) {
        part[k] = s + k < splits ? __ldcg(source + (s + k) * (kHeads * kQuads)) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (u32 k = 0; k < kAtOnce; ++k) {  // the weights behind the last split are 0
        sum.x = fmaf(part[k].x, weight[s + k], sum.x);
        sum.y = fmaf(part[k].y, weight[s + k], sum.y);
        sum.z = fmaf(part[k].z, weight[s + k], sum.z);
        sum.w = fmaf(part[k].w, weight[s + k], sum.w);
      }
    }
    *reinterpret_cast<uint2*>(out + i * 4) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
  }
}

// `query` is that of the KV head's first query head, rotated; area_of(warp) is that warp's DecodeArea.
template <class AreaOf, class Make = IsMade>
__device__ inline void decode_split(const AreaOf& area_of, DecodeShared& shared, const Step& step, const WorkList& work,
                                    const WorkItem& item, u32 kv_head, const Operand* query, const KvElement* pages,
                                    bf16* out, const AttentionScales& scales, const Newest<Make>& newest = {}) {
  const u32 splits = split_count(item.kv_length), end = min(item.first + split_keys(item.kv_length), item.kv_length);
  const i32* page_line = step.page_table + static_cast<u64>(item.line) * step.pages_per_sequence;
  bf16* target = out + static_cast<u64>(item.token) * kQueryWidth + kv_head * kGroup * kHeadDim;

  decode_warp(area_of(warp_in_group()), shared, query, pages, page_line, kv_head, item.first, end, scales.score,
              newest);
  synchronize_warpgroup();
  for (u32 i = thread_in_group(); i < kGroup * kHeadDim; i += kWarpgroup) {
    const u32 head = i / kHeadDim;
    float maximum = minus_infinity(), sum = 0.0f, value = 0.0f;
#pragma unroll
    for (u32 w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.ml[w][head].x);
#pragma unroll
    for (u32 w = 0; w < kWarps; ++w) {
      const float rescale = power_of_two(shared.ml[w][head].x - maximum);
      sum += shared.ml[w][head].y * rescale;
      value += area_of(w).out[head][i % kHeadDim] * rescale;
    }
    if (splits == 1) {
      target[i] = to_bf16(value / scales.divisor(sum));
    } else {
      const u64 at = static_cast<u64>(item.partial + item.split) * kHeads + kv_head * kGroup + head;
      __stcg(&work.partial_out[at * kHeadDim + i % kHeadDim], value);
      if (i % kHeadDim == 0) __stcg(&work.partial_ml[at], make_float2(maximum, sum));
    }
  }
  if (splits == 1) return;

  __threadfence();
  synchronize_warpgroup();
  u32* arrivals = work.arrivals + item.row * kKvHeads + kv_head;
  if (thread_in_group() == 0) shared.last = atomicAdd(arrivals, 1u) == splits - 1;
  synchronize_warpgroup();
  if (!shared.last) return;
  __threadfence();
  add_splits(shared, work, item.partial, splits, kv_head, target, scales);
  if (thread_in_group() == 0) *arrivals = 0;
}

}  // namespace blink

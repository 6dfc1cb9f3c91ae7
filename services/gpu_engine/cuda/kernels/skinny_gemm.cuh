// Y[tokens, outputs] = X[tokens, depth] W[outputs, depth]^T for at most 64 tokens: a stream of the weights.
//
// The weights are the wide operand: a tile is 128 of their rows, two warpgroups of 64, against all tokens (8, 16, 32 or
// 64 columns, one build each). W is cut into chunks of 128 x 64; chunk after chunk, all tiles in a row, the grid's
// blocks take equal contiguous runs, so each multiprocessor streams as many bytes. One thread copies W and X by TMA
// through a ring of stages that spans tiles; the ring, and more by way of L2, is filled with weights before the kernel
// waits for its predecessor.
//
// A tile whose chunks lie in several blocks' runs is finished by the block that arrives last, which adds the parts in
// the order of the chunks. So the order of every sum follows from W's shape and the grid alone: a row has the same bits
// in every bucket, beside any other rows.
//
// Bound by memory: 2 bytes a weight. Two blocks fit a multiprocessor, the second being the successor's.
#pragma once

#include "mma.cuh"

// mma.cuh first: tma.cuh uses its shared_address
#include "dependent_launch.cuh"
#include "tma.cuh"
#include "wgmma_narrow.cuh"

namespace blink {

inline constexpr u32 kTokens = BLINK_SKINNY_TOKENS;
inline constexpr u32 kTileRows = 128, kHalfRows = 64;
inline constexpr u32 kDepth = 64;  // of a chunk: 128 bytes a row, the swizzle's width
inline constexpr u32 kConsumers = 256;
inline constexpr u32 kProducerWarp = 8, kScaleWarp = 9;
inline constexpr u32 kThreads = 320;
inline constexpr u32 kConsumerBarrier = 1;
inline constexpr u32 kMostTokens = 64;  // tokens that a line of squares holds

struct Stage {
  bf16 weight[2][kHalfRows * kDepth];
  bf16 x[kTokens * kDepth];
};

// Finished sums go through shared memory, so that what follows a product sees consecutive outputs of a token.
inline constexpr u32 kStagedTokens = kTokens < 16 ? kTokens : 16;
inline constexpr u32 kStagedStride = kTileRows + 4;  // free of bank conflicts

inline constexpr u32 kBlockBytes = 113 * 1024;  // two blocks a multiprocessor
inline constexpr u32 kFixedBytes = kStagedTokens * kStagedStride * 4 + 512;
inline constexpr u32 kStages = (kBlockBytes - kFixedBytes) / sizeof(Stage);

struct SkinnyShared {
  alignas(1024) Stage stages[kStages];
  float staged[kStagedTokens * kStagedStride];
  float scale[kTokens];
  CopyBarrier full[kStages], empty[kStages], scaled;
  u32 last;
};
static_assert(sizeof(SkinnyShared) <= kBlockBytes && sizeof(Stage) % 1024 == 0, "the ring fits, its atoms are aligned");

// skinny_gemm.py fills it. Row r of a tile is row tile * tile_rows + r of W, from 64 on tile * tile_rows + second + r
// - 64.
struct Problem {
  float4* partial;       // [2 grid][128 x kTokens] unfinished sums
  u32* arrivals;         // [tiles], zero between launches
  const float* squares;  // [square_tiles][kMostTokens] sums of X's squares, or null: no norm
  u32 square_tiles;
  float width, eps;  // of the norm
  u32 tokens, outputs, tiles, chunks, tile_rows, second;
  u32 prefetched;  // chunks a block prefetches into L2 beyond its ring
  u32 early;       // chunks still to be asked for when the successor may begin
};

// The chunks of a block: [begin, end) of all tiles' chunks in a row.
struct Run {
  u32 begin, end;
};

__device__ inline Run run_of(const Problem& problem, u32 block) {
  const u32 all = problem.tiles * problem.chunks;
  return {block * all / gridDim.x, (block + 1) * all / gridDim.x};
}

__device__ inline u32 block_of(const Problem& problem, u32 chunk) {
  return ((chunk + 1) * gridDim.x - 1) / (problem.tiles * problem.chunks);
}

__device__ inline void synchronize_consumers() {
  asm volatile("bar.sync %0, %1;" ::"n"(kConsumerBarrier), "n"(kConsumers) : "memory");
}

// A place in the run, with its tile and its chunk of the tile.
struct Cursor {
  u32 tile, chunk;

  __device__ Cursor(u32 place, u32 chunks) : tile(place / chunks), chunk(place % chunks) {}
  __device__ void advance(u32 chunks) {
    if (++chunk == chunks) chunk = 0, ++tile;
  }
};

__device__ inline void produce(SkinnyShared& shared, const TensorMap& weight, const TensorMap& x,
                               const Problem& problem) {
  const Run run = run_of(problem, blockIdx.x);
  const u32 count = run.end - run.begin, first = min(count, kStages);
  Cursor at(run.begin, problem.chunks);
  const auto row = [&](u32 half) { return at.tile * problem.tile_rows + half * problem.second; };
  const auto copy_weight = [&](u32 stage) {
    shared.full[stage].arrive_expecting(sizeof(Stage));
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      copy_box(shared.stages[stage].weight[half], weight, shared.full[stage], at.chunk * kDepth, row(half));
    }
  };
  const auto copy_x = [&](u32 stage, u32 chunk) {
    copy_box(shared.stages[stage].x, x, shared.full[stage], chunk * kDepth, 0);
  };

  for (u32 i = 0; i < first; ++i, at.advance(problem.chunks)) copy_weight(i);
  const Cursor behind_ring = at;
  for (u32 i = first; i < min(count, first + problem.prefetched); ++i, at.advance(problem.chunks)) {
    for (u32 half = 0; half < 2; ++half) prefetch_box(weight, at.chunk * kDepth, row(half));
  }
  at = behind_ring;
  if (count <= first + problem.early) let_successor_begin();
  wait_for_predecessor();
  for (u32 i = 0; i < first; ++i) copy_x(i, (run.begin + i) % problem.chunks);
  for (u32 i = first; i < count; ++i, at.advance(problem.chunks)) {
    const u32 stage = i % kStages;
    if (i + problem.early == count) let_successor_begin();
    shared.empty[stage].wait(i / kStages % 2 ^ 1);
    copy_weight(stage);
    copy_x(stage, at.chunk);
  }
  if (problem.early == 0) let_successor_begin();
}

// RMSNorm's factor of each token, from the sums of squares that the product before left (W normed(x) = factor W x,
// with the norm's weight already in x).
__device__ inline void find_scales(SkinnyShared& shared, const Problem& problem) {
  for (u32 token = threadIdx.x % 32; token < kTokens; token += 32) {
    float squares = 0.0f;
#pragma unroll 8
    for (u32 tile = 0; tile < problem.square_tiles; ++tile) {
      squares += __ldcg(problem.squares + tile * kMostTokens + token);
    }
    shared.scale[token] = problem.squares ? rsqrtf(squares / problem.width + problem.eps) : 1.0f;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared.scaled.arrive();
}

using Sums = float[kTokens / 2];

// Leaves this block's part of a tile; true in the block that came last, with all parts added in order.
__device__ inline bool combine(SkinnyShared& shared, const Problem& problem, u32 tile, Sums& sums) {
  constexpr u32 kWords = kTokens / 8;
  const u32 begin = tile * problem.chunks;
  const u32 first = block_of(problem, begin), end = block_of(problem, begin + problem.chunks - 1) + 1;
  // A block's run has at most two unfinished tiles: its first and its last.
  const u32 second_of_first = run_of(problem, first).begin < begin;
  const auto part = [&](u32 block) {
    return problem.partial + (2 * block + (block == first ? second_of_first : 0)) * kWords * kConsumers + threadIdx.x;
  };
  float4* mine = part(blockIdx.x);
#pragma unroll
  for (u32 i = 0; i < kWords; ++i) {
    __stcg(mine + i * kConsumers, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  }
  __threadfence();
  synchronize_consumers();
  if (threadIdx.x == 0) shared.last = atomicAdd(&problem.arrivals[tile], 1u) == end - first - 1;
  synchronize_consumers();
  if (!shared.last) return false;
  __threadfence();
  if (threadIdx.x == 0) problem.arrivals[tile] = 0;
#pragma unroll
  for (u32 i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
#pragma unroll kTokens <= 16 ? 4 : 2
  for (u32 block = first; block < end; ++block) {
    const float4* source = part(block);
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) {
      const float4 added = __ldcg(source + i * kConsumers);
      sums[4 * i] += added.x, sums[4 * i + 1] += added.y, sums[4 * i + 2] += added.z, sums[4 * i + 3] += added.w;
    }
  }
  return true;
}

template <class Epilogue>
__device__ inline void finish(SkinnyShared& shared, const Problem& problem, u32 tile, const Sums& sums,
                              const Epilogue& epilogue) {
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  shared.scaled.wait(0);
#pragma unroll
  for (u32 base = 0; base < kTokens; base += kStagedTokens) {
    if (base >= problem.tokens) break;
    synchronize_consumers();
#pragma unroll
    for (u32 i = 0; i < kStagedTokens / 8; ++i) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        shared.staged[(i * 8 + column + k % 2) * kStagedStride + row + k / 2 * 8] = sums[(base / 8 + i) * 4 + k];
      }
    }
    synchronize_consumers();
    epilogue.write(shared, problem, tile, base);
  }
}

template <class Epilogue>
__device__ inline void consume(SkinnyShared& shared, const Problem& problem, const Epilogue& epilogue) {
  const Run run = run_of(problem, blockIdx.x);
  const u32 half = threadIdx.x / 128;
  u32 stage = 0, parity = 0;
  for (u32 place = run.begin; place < run.end;) {
    const u32 tile = place / problem.chunks, tile_begin = tile * problem.chunks;
    const u32 stop = min(run.end, tile_begin + problem.chunks);
    const bool whole = place == tile_begin && stop == tile_begin + problem.chunks;
    Sums sums = {};
    for (; place < stop; ++place) {
      shared.full[stage].wait(parity);
      const u32 a = shared_address(shared.stages[stage].weight[half]), b = shared_address(shared.stages[stage].x);
      begin_products();
#pragma unroll
      for (u32 k = 0; k < kDepth; k += 16) multiply_narrow(sums, operand(a + k * 2, 1024), operand(b + k * 2, 1024));
      commit_products();
      wait_products<0>(sums);
      if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (whole || combine(shared, problem, tile, sums)) finish(shared, problem, tile, sums, epilogue);
  }
}

template <class Epilogue>
__device__ inline void skinny_gemm(const TensorMap& weight, const TensorMap& x, const Problem& problem,
                                   const Epilogue& epilogue) {
  extern __shared__ __align__(1024) unsigned char memory[];
  SkinnyShared& shared = *reinterpret_cast<SkinnyShared*>(memory);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kConsumers / 32);
    }
    shared.scaled.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  const u32 warp = threadIdx.x / 32;
  if (warp == kProducerWarp) {
    if (threadIdx.x % 32 == 0) produce(shared, weight, x, problem);
  } else if (warp == kScaleWarp) {
    wait_for_predecessor();
    find_scales(shared, problem);
  } else {
    wait_for_predecessor();
    consume(shared, problem, epilogue);
  }
}

}  // namespace blink

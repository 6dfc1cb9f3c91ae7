// Y[tokens, outputs] = X[tokens, depth] W[outputs, depth]^T for at most 64 tokens: a stream of the weights.
//
// The weights are the wide operand of wgmma, all tokens its columns: 8, 16, 32 or 64, one build each. A block walks
// `run` tiles of `rows` weight rows, each over the whole depth; one thread copies W and X by TMA through a ring of
// stages that spans tiles, filled with weights before the kernel waits for its predecessor.
//
// Every sum runs over k in order, 16 at a time, in one accumulator: no split. So a row has the same bits whatever the
// tiles, the blocks and the tokens beside it, and the same as from those of cuBLASLt's algorithms that don't split.
//
// Bound by memory: 2 bytes a weight.
#pragma once

#include "dependent_launch.cuh"
#include "mma.cuh"
#include "skinny_problem.cuh"
#include "wgmma_narrow.cuh"

namespace blink {

inline constexpr u32 kDepth = 64;  // columns of a stage
static_assert(kRowBytes == 2 * kDepth);

// A stage is `rows` rows of W, then kTokens of X. Products of fewer rows than a warpgroup's 64 read on
// into whatever follows, which makes rows of sums that nobody looks at; that much room is behind the ring.
struct Ring {
  SkinnyBarriers& barriers;
  u32 stages, weight_bytes;

  __device__ u32 stage_bytes() const { return weight_bytes + kTokens * kRowBytes; }
  __device__ unsigned char* weight(u32 stage) const {
    return reinterpret_cast<unsigned char*>(&barriers + 1) + stage * stage_bytes();
  }
  __device__ unsigned char* x(u32 stage) const { return weight(stage) + weight_bytes; }
};

// How W lies in a tile. Rows alternate in a gated product, W being gate over up: eight of the gate's, then the same
// eight of up's. So a thread's sums hold both of an output, `gate = sums[4n + k]`, `up = sums[4n + 2 + k]`.
struct Plain {
  __device__ static void copy(void* target, const TensorMap& map, CopyBarrier& done, const Cursor& at) {
    copy_box(target, map, done, at.chunk * kDepth, at.row);
  }
};

struct Gated {
  __device__ static void copy(void* target, const TensorMap& map, CopyBarrier& done, const Cursor& at) {
    copy_box(target, map, done, at.chunk * kDepth, 0, 0, at.row / 16);
  }
};

template <class Layout>
__device__ inline void produce(const Ring& ring, const TensorMap& weight, const TensorMap& x, const Problem& problem) {
  const u32 count = problem.run * problem.chunks, first = min(count, ring.stages);
  Cursor at{blockIdx.x * problem.run * problem.rows};
  const auto copy_weight = [&](u32 stage) {
    ring.barriers.full[stage].arrive_expecting(ring.stage_bytes());
    Layout::copy(ring.weight(stage), weight, ring.barriers.full[stage], at);
  };
  const auto copy_x = [&](u32 stage, u32 chunk) {
    copy_box(ring.x(stage), x, ring.barriers.full[stage], chunk * kDepth, 0);
  };

  let_successor_begin();
  for (u32 i = 0; i < first; ++i, at.advance(problem)) copy_weight(i);
  prefetch_map(x);
  wait_for_predecessor();
  for (u32 i = 0; i < first; ++i) copy_x(i, i % problem.chunks);
  Slot slot{first == ring.stages ? 0 : first, 0};
  for (u32 i = first; i < count; ++i, at.advance(problem), slot.advance(ring.stages)) {
    ring.barriers.empty[slot.stage].wait(slot.parity);
    copy_weight(slot.stage);
    copy_x(slot.stage, at.chunk);
  }
}

template <class Ending>
__device__ inline void consume(const Ring& ring, const Problem& problem, const Ending& ending) {
  const u32 group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const u32 row = threadIdx.x / 32 * 16;  // this warp's first, of the tile
  Slot slot, oldest;                      // oldest: the first not given back
  const auto give_back = [&] {
    if (lane == 0) ring.barriers.empty[oldest.stage].arrive();
    oldest.advance(ring.stages);
  };
  for (u32 tile = blockIdx.x * problem.run; tile < (blockIdx.x + 1) * problem.run; ++tile) {
    Sums sums = {};
    for (u32 chunk = 0; chunk < problem.chunks; ++chunk, slot.advance(ring.stages)) {
      ring.barriers.full[slot.stage].wait(slot.parity);
      const u64 a = operand(shared_address(ring.weight(slot.stage)) + group * kGroupRows * kRowBytes, 1024);
      const u64 b = operand(shared_address(ring.x(slot.stage)), 1024);
      begin_products();
#pragma unroll
      for (u32 k = 0; k < kDepth / 16; ++k) multiply_narrow(sums, a + 2 * k, b + 2 * k);  // 16-byte units
      commit_products();
      wait_products<1>();
      if (chunk > 0) give_back();
    }
    wait_products<0>(sums);
    give_back();
    if (row < problem.rows) ending.write(sums, problem, tile * problem.rows + row);
  }
}

template <class Layout, class Ending>
__device__ inline void skinny_gemm(unsigned char* memory, const TensorMap& weight, const TensorMap& x,
                                   const Problem& problem, const Ending& ending) {
  const Ring ring{*reinterpret_cast<SkinnyBarriers*>(memory), problem.stages, problem.rows * kRowBytes};
  const u32 groups = (problem.rows + kGroupRows - 1) / kGroupRows;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < problem.stages; ++i) {
      ring.barriers.full[i].init(1);
      ring.barriers.empty[i].init(groups * 4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const u32 warp = threadIdx.x / 32;
  if (warp == kProducerWarp) {
    if (threadIdx.x % 32 == 0) produce<Layout>(ring, weight, x, problem);
  } else {
    wait_for_predecessor();
    if (warp < groups * 4) consume(ring, problem, ending);
  }
}

}  // namespace blink

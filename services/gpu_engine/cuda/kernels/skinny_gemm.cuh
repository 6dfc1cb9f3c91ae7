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

#include "mma.cuh"
#include "skinny_pipeline.cuh"
#include "wgmma_narrow.cuh"

namespace blink {

inline constexpr u32 kDepth = kBoxColumns;  // columns of a stage
static_assert(kRowBytes == 2 * kDepth);

// Products of fewer rows than a warpgroup's 64 read on into whatever follows a stage's rows, which makes rows of sums
// that nobody looks at; that much room is behind the ring.

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

template <class Ending>
__device__ inline void consume(const Ring<1>& ring, const Problem& problem, const Ending& ending) {
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
  run_pipeline<Layout, 1>(memory, weight, x, problem, [&](const Ring<1>& ring) { consume(ring, problem, ending); });
}

}  // namespace blink

// Y[tokens, outputs] = X[tokens, depth] W[outputs, depth]^T for at most 64 tokens, W in FP8: a stream of the codes.
//
// The schedule is skinny_gemm.cuh's: W is the wide operand of wgmma, a block walks `run` tiles of `rows` weight rows,
// one thread copies by TMA through a ring. Here a stage holds 128 columns, as many bytes of W as there. Consumers read
// the codes from shared memory, make bf16 of code times scale and give them to wgmma in registers, so that the
// operands, and the order of their sums, are those of a bf16 product of the dequantized weights: the same bits.
//
// A warp reads a row's 16 columns of a step as two bytes a lane at 2c and 2c + 8, rows apart by the swizzle: no bank
// conflict. Bound by memory: 1 byte a weight, and 4 for each 128 where scales are of blocks.
#pragma once

#include "fp8_matrix.cuh"
#include "mma.cuh"
#include "skinny_pipeline.cuh"
#include "wgmma_narrow.cuh"

namespace blink {

inline constexpr u32 kFp8Depth = kScaleColumns;         // columns of a stage
inline constexpr u32 kSteps = kFp8Depth / 16;           // products of a stage
inline constexpr u32 kBoxes = kFp8Depth / kBoxColumns;  // of X in a stage

// How W lies in a tile, see Plain and Gated of skinny_gemm.cuh; the map of W counts pairs of codes. Of a warp's 16 rows
// from `first` on, `half` is the first or second eight: which output they belong to, and which row of W they are.
struct Fp8Plain {
  __device__ static void copy(void* target, const TensorMap& map, CopyBarrier& done, const Cursor& at) {
    copy_box(target, map, done, at.chunk * kFp8Depth / 2, at.row);
  }
  __device__ static u32 output(u32 first, u32 half, u32 g) { return first + half * 8 + g; }
  __device__ static u32 row(const Problem&, u32 output, u32) { return output; }
};

struct Fp8Gated {
  __device__ static void copy(void* target, const TensorMap& map, CopyBarrier& done, const Cursor& at) {
    copy_box(target, map, done, at.chunk * kFp8Depth / 2, 0, 0, at.row / 16);
  }
  __device__ static u32 output(u32 first, u32, u32 g) { return first / 2 + g; }
  __device__ static u32 row(const Problem& problem, u32 output, u32 half) { return half * problem.outputs + output; }
};

using Fragments = u32[kSteps][4];

// This lane's part of a warp's 16 rows from `row` on, as wgmma wants it in registers.
__device__ inline void load_fragments(Fragments& a, const unsigned char* tile, u32 row, float low_scale,
                                      float high_scale) {
  const u32 g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const unsigned char* low = tile + (row + g) * kRowBytes + 2 * c;  // rows row + g and row + g + 8 swizzle alike
  const unsigned char* high = low + 8 * kRowBytes;
#pragma unroll
  for (u32 step = 0; step < kSteps; ++step) {
    const u32 at = (step ^ g) * 16;
    a[step][0] = dequantize(*reinterpret_cast<const u16*>(low + at), low_scale);
    a[step][1] = dequantize(*reinterpret_cast<const u16*>(high + at), high_scale);
    a[step][2] = dequantize(*reinterpret_cast<const u16*>(low + at + 8), low_scale);
    a[step][3] = dequantize(*reinterpret_cast<const u16*>(high + at + 8), high_scale);
  }
}

template <class Layout, class Ending>
__device__ inline void consume_fp8(const Ring<kBoxes>& ring, const Fp8Matrix& matrix, const Problem& problem,
                                   const Ending& ending) {
  const u32 lane = threadIdx.x % 32;
  const u32 row = threadIdx.x / 32 * 16;  // this warp's first, of the tile
  const bool there = row < problem.rows;
  Slot slot, oldest;  // oldest: the first not given back
  const auto give_back = [&] {
    if (lane == 0) ring.barriers.empty[oldest.stage].arrive();
    oldest.advance(ring.stages);
  };
  for (u32 tile = blockIdx.x * problem.run; tile < (blockIdx.x + 1) * problem.run; ++tile) {
    const auto scale = [&](u32 half, u32 chunk) {
      const u32 output = Layout::output(tile * problem.rows + row, half, lane / 4);
      if (!there || output >= problem.outputs || chunk >= problem.chunks) return 0.0f;
      return matrix.scale(Layout::row(problem, output, half), chunk);
    };
    Sums sums = {};
    float low_scale = scale(0, 0), high_scale = scale(1, 0);
    // Registers that products in flight still read are not written: two sets, in turn.
    const auto multiply = [&](Fragments& a, u32 chunk) {
      const float next_low = scale(0, chunk + 1), next_high = scale(1, chunk + 1);
      ring.barriers.full[slot.stage].wait(slot.parity);
      if (there) load_fragments(a, ring.weight(slot.stage), row, low_scale, high_scale);
      const u32 x = shared_address(ring.x(slot.stage));
      begin_products();
#pragma unroll
      for (u32 step = 0; step < kSteps; ++step) {
        multiply_narrow(sums, a[step], operand(x + step / 4 * kTokenBytes, 1024) + 2 * (step % 4));  // 16-byte units
      }
      commit_products();
      wait_products<1>();
      if (chunk > 0) give_back();
      low_scale = next_low, high_scale = next_high;
      slot.advance(ring.stages);
    };
    Fragments even = {}, odd = {};
    for (u32 chunk = 0; chunk < problem.chunks; chunk += 2) {
      multiply(even, chunk);
      if (chunk + 1 < problem.chunks) multiply(odd, chunk + 1);
    }
    wait_products<0>(sums);
    give_back();
    if (there) ending.write(sums, problem, tile * problem.rows + row);
  }
}

template <class Layout, class Ending>
__device__ inline void skinny_fp8(unsigned char* memory, const TensorMap& weight, const TensorMap& x,
                                  const Fp8Matrix& matrix, const Problem& problem, const Ending& ending) {
  run_pipeline<Layout, kBoxes>(memory, weight, x, problem,
                               [&](const Ring<kBoxes>& ring) { consume_fp8<Layout>(ring, matrix, problem, ending); });
}

}  // namespace blink

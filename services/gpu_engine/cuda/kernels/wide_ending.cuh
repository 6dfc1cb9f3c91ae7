// SwiGLU of a wide product's sums, and their way into memory.
#pragma once

#include "swiglu.cuh"
#include "wide_tiles.cuh"

namespace blink {

// Writes the outputs of a warp's 16 tokens in bf16. `token` and `output` are the first; `slice` is the warp's shared
// memory. Sums are laid out as wgmma.cuh says; eight columns of the gate come before the same eight of the up, so a
// thread has both factors of its outputs. They are rounded to bf16 first, as between two kernels.
//
// By way of the slice whole lines of 128 bytes are written at a time. Its pieces of 16 bytes are exchanged by the row's
// number in its eight, so that neither way lanes meet in a bank.
__device__ inline void write_swiglu(bf16* out, const WideSums& sums, unsigned char* slice, const WideProblem& problem,
                                    u32 token, u32 output) {
  constexpr u32 kPieces = kColumns / 16;  // of eight outputs
  const u32 lane = threadIdx.x % 32, row = lane / 4;
  const u32 place = lane % kSlicePieces, line = lane / kSlicePieces;  // of a piece on its way out
#pragma unroll
  for (u32 first = 0; first < kPieces; first += kSlicePieces) {
    const u32 count = kPieces - first < kSlicePieces ? kPieces - first : kSlicePieces;
#pragma unroll
    for (u32 piece = 0; piece < count; ++piece) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 i = 8 * (first + piece) + 2 * half;
        const u32 gates = pack(sums[i], sums[i + 1]), ups = pack(sums[i + 4], sums[i + 5]);
        unsigned char* at = slice + (row + 8 * half) * kSlicePieces * 16 + (piece ^ row) * 16 + lane % 4 * 4;
        *reinterpret_cast<u32*>(at) =
            pack(gated(low_half(gates), low_half(ups)), gated(high_half(gates), high_half(ups)));
      }
    }
    __syncwarp();
    const u32 column = output + (first + place) * 8;
#pragma unroll
    for (u32 i = 0; i < 16; i += 32 / kSlicePieces) {
      const u32 from = i + line;
      if (place < count && token + from < problem.tokens && column < problem.outputs) {
        const unsigned char* at = slice + from * kSlicePieces * 16 + (place ^ from % 8) * 16;
        store_raw(out + static_cast<u64>(token + from) * problem.outputs + column, *reinterpret_cast<const uint4*>(at));
      }
    }
    __syncwarp();
  }
}

}  // namespace blink

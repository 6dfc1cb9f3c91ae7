// Grouped matrix products of a mixture-of-experts layer: rows of one expert times rows of its weights.
//
// A block computes one item (consecutive rows of one expert) for kOut weight rows: weights are the 16-row operand of
// mma.sync and the item's rows the 8-column one, so an expert with few rows wastes nothing. Chunks of 64 inputs of both
// are copied asynchronously into a ring in shared memory; fragments come from there in 16-byte loads without a
// transpose: a dot product does not care in which order it is summed, so lane c of four takes 8 consecutive inputs of
// every 32 of both operands. Every result is one chain of sums over the inputs, the same in all shapes, so it depends
// neither on the batch nor on the shape that is launched.
#pragma once

#include "dependent_launch.cuh"
#include "mixture.cuh"
#include "mma.cuh"

namespace blink {

inline constexpr u32 kChunk = 64;                // inputs of a stage
inline constexpr u32 kChunkPieces = kChunk / 8;  // 16-byte pieces of a row
inline constexpr u32 kGemmWarps = 4, kGemmThreads = 32 * kGemmWarps;

// How a block is cut. kItemRows is the most rows of an item, kTiles the 16-row weight tiles of a warp; kOutWarps warps
// lie side by side over the weights, the others over the item's rows.
template <u32 kItemRows_, u32 kTiles_, u32 kOutWarps_, u32 kStages_>
struct GemmShape {
  static constexpr u32 kItemRows = kItemRows_, kTiles = kTiles_, kOutWarps = kOutWarps_, kStages = kStages_;
  static constexpr u32 kRowWarps = kGemmWarps / kOutWarps;
  static constexpr u32 kOut = kOutWarps * kTiles * 16;  // weight rows of a block
  static constexpr u32 kStageElements = (kOut + kItemRows) * kChunk;
  static constexpr u32 kShared = kStages * kStageElements * sizeof(bf16);
};

// Thin: no item of a step of at most 8 tokens has more rows. Small blocks and a deep ring: decode is all weights.
using Thin = GemmShape<8, 1, 4, 8>;
// Narrow: experts see a few rows each.
using Narrow = GemmShape<32, 1, 4, 6>;
// Medium: batches whose experts see some tens of rows; still bound by the weights, each read once.
using Medium = GemmShape<64, 2, 4, 4>;
// Wide: prefill, bound by the tensor cores.
using Wide = GemmShape<128, 4, 2, 3>;

struct GemmOperands {
  const bf16* x;       // [rows, kInputs]; of kGather [tokens, kInputs]
  const bf16* weight;  // [kExperts, weight rows of an expert, kInputs]
  bf16* out;           // [rows, outputs]
};

__device__ inline u32 chunk_piece(u32 row, u32 piece) { return row * kChunkPieces + (piece ^ (row % 2 * 4)); }

// kGateUp: x is gathered by token, and out = silu(gate x) * (up x): weight rows come as 8 of gate and the same 8 of up
// in each tile, so one lane holds both. Else out = weight x, row by row. kRowTiles 8-row tiles a warp.
template <class Shape, bool kGateUp, u32 kInputs, u32 kOutputs, u32 kRowTiles>
__device__ inline void multiply_item(bf16* shared, const MixtureWork& work, const MixtureItem& item,
                                     const GemmOperands& operands, u32 block) {
  constexpr u32 kRows = Shape::kRowWarps * kRowTiles * 8;  // of the item, as far as this block computes any
  constexpr u32 kChunks = kInputs / kChunk, kOut = Shape::kOut, kStages = Shape::kStages;
  constexpr u32 kWeightRows = kGateUp ? 2 * kOutputs : kOutputs;
  static_assert(kInputs % kChunk == 0 && kRows <= Shape::kItemRows);
  constexpr u32 kRowsAtOnce = kGemmThreads / kChunkPieces;  // a thread copies one piece of every 16th row
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 my_row = threadIdx.x / kChunkPieces, my_piece = threadIdx.x % kChunkPieces;

  const bf16* weight = operands.weight + static_cast<u64>(item.expert) * kWeightRows * kInputs + my_piece * 8;
  const auto weight_row = [&](u32 row) {  // row of the expert that lies at `row` of the stage
    if constexpr (!kGateUp) return block * kOut + row;
    return row / 8 % 2 * kOutputs + block * (kOut / 2) + row / 16 * 8 + row % 8;
  };
  const auto stage_of = [&](u32 chunk) { return shared_address(shared + chunk % kStages * Shape::kStageElements); };
  const auto fetch_weights = [&](u32 chunk) {
    if (chunk >= kChunks) return;
#pragma unroll
    for (u32 i = 0; i < kOut / kRowsAtOnce; ++i) {
      const u32 row = my_row + i * kRowsAtOnce;
      copy_async(stage_of(chunk) + chunk_piece(row, my_piece) * 16,
                 weight + static_cast<u64>(weight_row(row)) * kInputs + chunk * kChunk, true);
    }
  };
#pragma unroll
  for (u32 chunk = 0; chunk < kStages - 1; ++chunk) fetch_weights(chunk);
  let_successor_begin();
  if constexpr (!kGateUp) wait_for_predecessor();

  constexpr u32 kXCopies = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  const bf16* x[kXCopies];
#pragma unroll
  for (u32 i = 0; i < kXCopies; ++i) {
    const u32 row = item.first + min(my_row + i * kRowsAtOnce, item.rows - 1);
    const u64 source = kGateUp ? static_cast<u64>(work.row_token[row]) : row;
    x[i] = operands.x + source * kInputs + my_piece * 8;
  }
  const auto fetch_rows = [&](u32 chunk) {
    if (chunk < kChunks) {
#pragma unroll
      for (u32 i = 0; i < kXCopies; ++i) {
        const u32 row = my_row + i * kRowsAtOnce;
        if (kRows % kRowsAtOnce == 0 || row < kRows) {
          copy_async(stage_of(chunk) + chunk_piece(kOut + row, my_piece) * 16, x[i] + chunk * kChunk, row < item.rows);
        }
      }
    }
    commit_copies();
  };
#pragma unroll
  for (u32 chunk = 0; chunk < kStages - 1; ++chunk) fetch_rows(chunk);

  const u32 out_row = warp % Shape::kOutWarps * Shape::kTiles * 16, x_row = warp / Shape::kOutWarps * kRowTiles * 8;
  float sum[Shape::kTiles][kRowTiles][4] = {};
#pragma unroll 1
  for (u32 chunk = 0; chunk < kChunks; ++chunk) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetch_weights(chunk + kStages - 1);
    fetch_rows(chunk + kStages - 1);
    const uint4* stage = reinterpret_cast<const uint4*>(shared + chunk % kStages * Shape::kStageElements);
#pragma unroll
    for (u32 s = 0; s < kChunk / 32; ++s) {
      uint4 low[Shape::kTiles], high[Shape::kTiles];
#pragma unroll
      for (u32 t = 0; t < Shape::kTiles; ++t) {
        low[t] = stage[chunk_piece(out_row + t * 16 + g, s * 4 + c)];
        high[t] = stage[chunk_piece(out_row + t * 16 + 8 + g, s * 4 + c)];
      }
#pragma unroll
      for (u32 r = 0; r < kRowTiles; ++r) {
        const uint4 b = stage[chunk_piece(kOut + x_row + r * 8 + g, s * 4 + c)];
#pragma unroll
        for (u32 t = 0; t < Shape::kTiles; ++t) mma(sum[t][r], low[t].x, high[t].x, low[t].y, high[t].y, b.x, b.y);
#pragma unroll
        for (u32 t = 0; t < Shape::kTiles; ++t) mma(sum[t][r], low[t].z, high[t].z, low[t].w, high[t].w, b.z, b.w);
      }
    }
  }
  wait_copies<0>();
  __syncthreads();

  // Results pass through shared memory, so that they leave in 16-byte pieces.
  constexpr u32 kColumns = kGateUp ? kOut / 2 : kOut, kStride = kColumns + 8;
  static_assert(kRows * kStride <= kStages * Shape::kStageElements);
#pragma unroll
  for (u32 t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
    for (u32 r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (u32 k = 0; k < 2; ++k) {  // weight rows g and g + 8 of the tile, item rows 2c + k
        bf16* target = shared + (x_row + r * 8 + 2 * c + k) * kStride;
        const float a = sum[t][r][k], b = sum[t][r][2 + k];
        if constexpr (kGateUp) {
          target[(out_row + t * 16) / 2 + g] = to_bf16(a / (1.0f + __expf(-a)) * b);
        } else {
          target[out_row + t * 16 + g] = to_bf16(a);
          target[out_row + t * 16 + 8 + g] = to_bf16(b);
        }
      }
    }
  }
  __syncthreads();
  bf16* out = operands.out + static_cast<u64>(item.first) * kOutputs + block * kColumns;
  for (u32 i = threadIdx.x; i < item.rows * (kColumns / 8); i += kGemmThreads) {
    const u32 row = i / (kColumns / 8), piece = i % (kColumns / 8);
    store_raw(out + static_cast<u64>(row) * kOutputs + piece * 8, load_raw(shared + row * kStride + piece * 8));
  }
}

// Runs the block's item with as many row tiles as it needs: 1, 2, 4 or 8 for each warp, of wide shapes any from 2.
template <class Shape, bool kGateUp, u32 kInputs, u32 kOutputs, u32 kRowTiles = Shape::kRowWarps>
__device__ inline void multiply_fitting(bf16* shared, const MixtureWork& work, const MixtureItem& item,
                                        const GemmOperands& operands, u32 block) {
  constexpr u32 kMost = Shape::kItemRows / (8 * Shape::kRowWarps);
  constexpr u32 kNext = Shape::kRowWarps == 1 ? 2 * kRowTiles : kRowTiles + 1;
  if constexpr (kRowTiles < kMost) {
    if (item.rows > kRowTiles * 8 * Shape::kRowWarps) {
      multiply_fitting<Shape, kGateUp, kInputs, kOutputs, kNext>(shared, work, item, operands, block);
      return;
    }
  }
  multiply_item<Shape, kGateUp, kInputs, kOutputs, kRowTiles>(shared, work, item, operands, block);
}

// An item, of no rows beyond the list. Read from L2: what this multiprocessor holds may be of the layer before.
__device__ inline MixtureItem item_of(const MixtureWork& work, u32 index) {
  if (index >= __ldcg(work.item_count)) return {};
  const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(work.items + index));
  return {raw.x, raw.y, raw.z, raw.w};
}

// Grid (blocks of weight rows, items at most).
//
// Launches overlap (dependent_launch.cuh). Routing is over when gate-up's blocks have waited, and only then do they let
// down's begin; so down reads the work list and begins to copy its weights before gate-up has ended.
template <class Shape, bool kGateUp, u32 kInputs, u32 kOutputs>
__device__ inline void grouped_gemm(const MixtureWork& work, const GemmOperands& operands) {
  bf16* memory = dynamic_shared<bf16>();
  if constexpr (kGateUp) wait_for_predecessor();
  const MixtureItem item = item_of(work, blockIdx.y);
  if (item.rows == 0) {
    if constexpr (!kGateUp) wait_for_predecessor();
    return;
  }
  multiply_fitting<Shape, kGateUp, kInputs, kOutputs>(memory, work, item, operands, blockIdx.x);
}

}  // namespace blink

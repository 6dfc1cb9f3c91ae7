// The skinny products of a step, each with what follows it: skinny_gemm.cuh has the product, this file the ends.
//
// An epilogue's write() is called by all consumers with `kStagedTokens` tokens of a tile's sums in shared memory, from
// token `base` on. 16 threads share a token, each with 8 consecutive outputs.
//   skinny_store      y = s W x, bf16
//   skinny_logits     the same, float32
//   skinny_swiglu     silu(s Wg x) * (s Wu x), W = gate over up: a tile is 64 rows of each
//   skinny_residual   r += W x in float32; x' = r * next norm's weight, bf16, with the sums of r's squares of the tile:
//                     the next product finds the norm's factor s = 1 / sqrt(mean(r^2) + eps) from them (arXiv
//                     1910.07467)
#include "skinny_gemm.cuh"

namespace blink {

inline constexpr u32 kOutputThreads = kTileRows / 8;  // of a token

struct Place {
  u32 token, output;  // output: within the tile

  __device__ Place(u32 base, u32 threads) : token(base + threadIdx.x / threads), output(threadIdx.x % threads * 8) {}
};

__device__ inline Eight staged(const SkinnyShared& shared, u32 base, u32 token, u32 row) {
  Eight values = load(shared.staged + (token - base) * kStagedStride + row);
  const float scale = shared.scale[token];
#pragma unroll
  for (u32 k = 0; k < 8; ++k) values.value[k] *= scale;
  return values;
}

struct Store {
  bf16* out;

  __device__ void write(const SkinnyShared& shared, const Problem& problem, u32 tile, u32 base) const {
    const Place place(base, kOutputThreads);
    const u32 output = tile * kTileRows + place.output;
    if (place.token >= min(problem.tokens, base + kStagedTokens) || output >= problem.outputs) return;
    const u64 at = static_cast<u64>(place.token) * problem.outputs + output;
    store(out + at, staged(shared, base, place.token, place.output));
  }
};

struct Logits {
  float* out;

  // One output a thread: rows of an odd vocabulary are not aligned.
  __device__ void write(const SkinnyShared& shared, const Problem& problem, u32 tile, u32 base) const {
    const u32 row = threadIdx.x % kTileRows, output = tile * kTileRows + row;
    if (output >= problem.outputs) return;
    for (u32 i = threadIdx.x / kTileRows; i < kStagedTokens; i += kConsumers / kTileRows) {
      const u32 token = base + i;
      if (token >= problem.tokens) break;
      const float value = shared.staged[i * kStagedStride + row] * shared.scale[token];
      out[static_cast<u64>(token) * problem.outputs + output] = value;
    }
  }
};

struct Swiglu {
  bf16* out;

  __device__ void write(const SkinnyShared& shared, const Problem& problem, u32 tile, u32 base) const {
    const Place place(base, kHalfRows / 8);
    const u32 output = tile * kHalfRows + place.output;
    if (place.token >= min(problem.tokens, base + kStagedTokens) || output >= problem.outputs) return;
    Eight gate = staged(shared, base, place.token, place.output);
    const Eight up = staged(shared, base, place.token, kHalfRows + place.output);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) gate.value[k] = gate.value[k] / (1.0f + __expf(-gate.value[k])) * up.value[k];
    store(out + static_cast<u64>(place.token) * problem.outputs + output, gate);
  }
};

struct Residual {
  float* residual;
  const bf16* norm;
  bf16* out;
  float* squares;  // [tiles][kMostTokens]

  __device__ void write(const SkinnyShared& shared, const Problem& problem, u32 tile, u32 base) const {
    const Place place(base, kOutputThreads);
    const u32 output = tile * kTileRows + place.output;
    const bool valid = place.token < min(problem.tokens, base + kStagedTokens);
    float sum = 0.0f;
    if (valid && output < problem.outputs) {
      const u64 at = static_cast<u64>(place.token) * problem.outputs + output;
      const Eight added = staged(shared, base, place.token, place.output), factor = load(norm + output);
      Eight row = load(residual + at);
#pragma unroll
      for (u32 k = 0; k < 8; ++k) row.value[k] += added.value[k];
      store(residual + at, row);
#pragma unroll
      for (u32 k = 0; k < 8; ++k) {
        sum += row.value[k] * row.value[k];
        row.value[k] *= factor.value[k];
      }
      store(out + at, row);
    }
#pragma unroll
    for (u32 distance = kOutputThreads / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    }
    if (valid && place.output == 0) squares[tile * kMostTokens + place.token] = sum;
  }
};

extern "C" __device__ u32 skinny_shared_bytes = sizeof(SkinnyShared);

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_store(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Problem problem,
                 bf16* out) {
  skinny_gemm(weight, x, problem, Store{out});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_logits(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Problem problem,
                  float* out) {
  skinny_gemm(weight, x, problem, Logits{out});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_swiglu(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Problem problem,
                  bf16* out) {
  skinny_gemm(weight, x, problem, Swiglu{out});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_residual(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Problem problem,
                    float* residual, const bf16* norm, bf16* out, float* squares) {
  skinny_gemm(weight, x, problem, Residual{residual, norm, out, squares});
}

}  // namespace blink

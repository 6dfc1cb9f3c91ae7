// The skinny products of a step, each with what follows it: skinny_gemm.cuh has the product, skinny_endings.cuh the
// endings.
//
//   skinny_store    Y in bf16
//   skinny_logits   Y in float32
//   skinny_swiglu   silu(gate) * up in bf16, W being gate over up; both are rounded to bf16 first, as between two
//   kernels
//
#include "skinny_endings.cuh"
#include "skinny_gemm.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_store(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                 const __grid_constant__ Problem problem, bf16* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  skinny_gemm<Plain>(memory, weight, x, problem, Store<>{out});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_logits(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                  const __grid_constant__ Problem problem, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  skinny_gemm<Plain>(memory, weight, x, problem, Logits{out});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    skinny_swiglu(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                  const __grid_constant__ Problem problem, bf16* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  skinny_gemm<Gated>(memory, weight, x, problem, Swiglu{out});
}

}  // namespace blink

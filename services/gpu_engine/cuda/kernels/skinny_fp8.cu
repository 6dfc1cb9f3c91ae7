// The skinny products of FP8 weights, each with what follows it: skinny_fp8.cuh has the product, skinny_endings.cuh the
// endings, skinny_gemm.cu says what they are.
#include "skinny_endings.cuh"
#include "skinny_fp8.cuh"

namespace blink {

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    skinny_fp8_store(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Fp8Matrix matrix,
                     const __grid_constant__ Problem problem, bf16* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  skinny_fp8<Fp8Plain>(memory, weight, x, matrix, problem, Store<>{out});
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    skinny_fp8_swiglu(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Fp8Matrix matrix,
                      const __grid_constant__ Problem problem, bf16* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  skinny_fp8<Fp8Gated>(memory, weight, x, matrix, problem, Swiglu{out});
}

}  // namespace blink

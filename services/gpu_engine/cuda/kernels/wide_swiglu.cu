// The product of gate and up with SwiGLU for many tokens (wide_swiglu.cuh).
#include "wide_swiglu.cuh"

namespace blink {

extern "C" __global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kWideThreads, 1)
    wide_swiglu(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                const __grid_constant__ WideProblem problem, bf16* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  multiply_swiglu(memory, weight, x, problem, out);
}

}  // namespace blink

// The products of a mixture-of-experts layer, each in four shapes (mixture_gemm.cuh):
//   mixture_gate_up_*  activated[row] = silu(gate x[token of row]) * (up x[token of row]), of the row's expert
//   mixture_down_*     out[row] = down activated[row]
// The host launches the shape that suits a step's tokens; results are the same bits in all of them.
#include "mixture_gemm.cuh"

namespace blink {

extern "C" __device__ u32 mixture_thin_shape[3] = {Thin::kOut, Thin::kItemRows, Thin::kShared};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 3)
    mixture_gate_up_thin(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Thin, true, kHidden, kExpertFfn>(work, operands);
}

extern "C" __global__ void __launch_bounds__(kGemmThreads, 3)
    mixture_down_thin(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Thin, false, kExpertFfn, kHidden>(work, operands);
}

extern "C" __device__ u32 mixture_narrow_shape[3] = {Narrow::kOut, Narrow::kItemRows, Narrow::kShared};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 3)
    mixture_gate_up_narrow(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Narrow, true, kHidden, kExpertFfn>(work, operands);
}

extern "C" __global__ void __launch_bounds__(kGemmThreads, 3)
    mixture_down_narrow(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Narrow, false, kExpertFfn, kHidden>(work, operands);
}

extern "C" __device__ u32 mixture_medium_shape[3] = {Medium::kOut, Medium::kItemRows, Medium::kShared};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 2)
    mixture_gate_up_medium(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Medium, true, kHidden, kExpertFfn>(work, operands);
}

extern "C" __global__ void __launch_bounds__(kGemmThreads, 2)
    mixture_down_medium(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Medium, false, kExpertFfn, kHidden>(work, operands);
}

extern "C" __device__ u32 mixture_wide_shape[3] = {Wide::kOut, Wide::kItemRows, Wide::kShared};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 2)
    mixture_gate_up_wide(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Wide, true, kHidden, kExpertFfn>(work, operands);
}

extern "C" __global__ void __launch_bounds__(kGemmThreads, 2)
    mixture_down_wide(MixtureWork work, GemmOperands operands) {
  grouped_gemm<Wide, false, kExpertFfn, kHidden>(work, operands);
}

}  // namespace blink

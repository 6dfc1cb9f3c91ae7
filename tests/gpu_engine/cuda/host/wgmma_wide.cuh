// The instructions of kernels/wgmma_wide.cuh in C++; each is finished when it returns.
#pragma once

#include "wgmma_narrow.cuh"

namespace blink {

template <u32 kCount>
void multiply_wide(float (&d)[kCount], u64 a, u64 b) {
  multiply_narrow(d, a, b);
}

}  // namespace blink

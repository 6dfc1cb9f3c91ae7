// SwiGLU's formula (arXiv 2002.05202), one for all kernels: a row has the same bits from each.
#pragma once

namespace blink {

__device__ inline float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

}  // namespace blink

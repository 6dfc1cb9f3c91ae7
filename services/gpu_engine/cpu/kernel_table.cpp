#include "services/gpu_engine/cpu/kernel_table.hpp"

#include <cstring>

namespace blink::cpu {

namespace baseline {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

const KernelTable* kernel_table(const char* name) {
  const KernelTable* supported[3];
  int count = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    supported[count++] = &avx512::table;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    supported[count++] = &avx2::table;
#endif
  supported[count++] = &baseline::table;
  if (!name) return supported[0];
  for (int i = 0; i < count; ++i)
    if (!std::strcmp(supported[i]->name, name)) return supported[i];
  return nullptr;
}

}  // namespace blink::cpu

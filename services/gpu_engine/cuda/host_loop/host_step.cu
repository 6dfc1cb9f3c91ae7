// What a step graph of the host-driven loop holds beside the model's kernels: its first node copies the step from the
// scheduling core's arrays, which lie in mapped host memory, to device memory; its last tells the host that the step's
// results lie in host memory. So a step costs the host one launch, no copy call and no wait in the driver.
#include "services/gpu_engine/core/request.hpp"
#include "step.cuh"

namespace blink {

// One step's announcement by the host, 16 bytes aligned; host_loop/loop.py has the same fields.
struct Announced {
  u32 tokens;
  u32 rows;
  u32 samples;
  u32 unused;
  u64 number;  // of the step
};

// A step's arrays, of 32-bit words; the last one is a table of lines.
inline constexpr u32 kArrays = 8;
enum Array : u32 { kTokenIds, kPositions, kRowStart, kKvLength, kSequence, kSampleRow, kSampling, kPageTable };

struct StepMirror {
  const u32* host[kArrays];
  u32* device[kArrays];
  const Announced* announced;  // in host memory
  StepCounts* counts;
  u64* number;
  u32 pages_per_sequence;
  u32 page_size;
};

__device__ inline u32 words_of(u32 array, const Announced& step) {
  switch (array) {
    case kTokenIds:
    case kPositions:
      return step.tokens;
    case kRowStart:
      return step.rows + 1;
    case kSampleRow:
      return step.samples;
    case kSampling:
      return step.samples * static_cast<u32>(sizeof(core::RowSampling) / sizeof(u32));
    default:
      return step.rows;
  }
}

// Of each row's line the pages in use.
__device__ inline void copy_page_table(const StepMirror& mirror, u32 rows) {
  const u32 *sequence = mirror.host[kSequence], *kv_length = mirror.host[kKvLength];
  for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u64 line = static_cast<u64>(sequence[row]) * mirror.pages_per_sequence;
    const u32 pages = (kv_length[row] + mirror.page_size - 1) / mirror.page_size;
    for (u32 i = threadIdx.x; i < pages; i += blockDim.x) {
      mirror.device[kPageTable][line + i] = mirror.host[kPageTable][line + i];
    }
  }
}

// Grid [any, kArrays]: the arrays travel side by side, because each read of host memory takes a microsecond.
extern "C" __global__ void fetch_step(StepMirror mirror) {
  const Announced step = *mirror.announced;
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const u32 array = blockIdx.y;
  if (array == kPageTable) {
    copy_page_table(mirror, step.rows);
  } else {
    const u32 words = words_of(array, step);
    for (u32 i = thread; i < words; i += threads) mirror.device[array][i] = mirror.host[array][i];
  }
  if (array == kTokenIds && thread == 0) {
    *mirror.counts = {step.tokens, step.rows, step.samples};
    *mirror.number = step.number;
  }
}

// One thread. The kernels before have written the step's results to host memory; this orders them before the number.
extern "C" __global__ void retire_host_step(const u64* number, u64* retired) { core::store_release(retired, *number); }

}  // namespace blink

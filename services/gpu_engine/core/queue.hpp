// Lists of requests in key order. Insertions are near the end as a rule, because keys grow with time.
#pragma once

#include "services/gpu_engine/core/state.hpp"

namespace blink::core {

// Inserts request `index` where its key belongs.
template <class Context>
BLINK_RARE_FN void insert(Context& context, State& state, Queue& queue, u32 index) {
  const Request& request = state.requests[index];
  u32 low = 0, high = queue.count;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (goes_before(state.requests[queue.items[middle]], request)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  // Shift [low, count) up by one, a tile at a time from the end, each read by all before it is written.
  const u32 threads = context.threads();
  for (u32 end = queue.count; end > low; end -= smaller(threads, end - low)) {
    const bool mine = context.thread() < smaller(threads, end - low);
    const u32 from = end - 1 - context.thread();
    const u32 item = mine ? queue.items[from] : 0;
    context.barrier();
    if (mine) queue.items[from + 1] = item;
  }
  leader(context, [&] {
    queue.items[low] = index;
    ++queue.count;
  });
}

// Keeps the items for which keep(index) holds, in order; leave(index, rank) for each of the others.
template <class Context, class Keep, class Leave>
BLINK_FN u32 compact(Context& context, Queue& queue, Keep keep, Leave leave) {
  const u32 count = queue.count;
  u32 item = 0;
  const u32 left = static_cast<u32>(scan(
      context, count,
      [&](u32 i) -> u64 {
        item = queue.items[i];
        return keep(item) ? 0 : 1;
      },
      [&](u32 i, u64 before) {
        if (keep(item)) {
          queue.items[i - before] = item;
        } else {
          leave(item, static_cast<u32>(before));
        }
      }));
  leader(context, [&] { queue.count = count - left; });
  return left;
}

}  // namespace blink::core

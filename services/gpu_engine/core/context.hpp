// The execution context: a team of threads that run the same code and meet at barriers.
//
// A context has
//   u32 thread(), threads()      this thread's number, and how many there are
//   void barrier()               all meet; memory written before is visible after
//   Scan exclusive(u64 value)    sum of the values of lower threads, and of all; has barriers inside
//   u64 sum(u64 value)           of all threads' values; has barriers inside
//   u32 min(u32 value)           the smallest of all threads' values; has barriers inside
//   Claimed claim(u32 key, u64 amount, u32 keys, bool active, take)
//                                one tile of the algorithm `claim` below; has barriers inside
// and every algorithm below is called by all threads with the same arguments. SerialContext is the team of one.
//
// Callbacks get an index and may be called by any thread, in any order unless said otherwise.
#pragma once

#include "services/gpu_engine/core/platform.hpp"

namespace blink::core {

struct Scan {
  u64 before;
  u64 total;
};

struct Claimed {
  u64 base;    // what take(key, ...) returned
  u64 before;  // amounts of the key since then, this one not included
};

class SerialContext {
 public:
  BLINK_FN u32 thread() const { return 0; }
  BLINK_FN u32 threads() const { return 1; }
  BLINK_FN void barrier() const {}
  BLINK_FN Scan exclusive(u64 value) const { return {0, value}; }
  BLINK_FN u64 sum(u64 value) const { return value; }
  BLINK_FN u32 min(u32 value) const { return value; }
  template <class Take>
  BLINK_FN Claimed claim(u32 key, u64 amount, u32, bool, Take take) const {
    return {take(key, amount), 0};
  }
};

// f(i) for i < n, without a barrier: for loops that touch what no other thread touches until the next one.
template <class Context, class F>
BLINK_FN void strided(Context& context, u64 n, F f) {
  for (u64 i = context.thread(); i < n; i += context.threads()) f(i);
}

template <class Context, class F>
BLINK_FN void for_each(Context& context, u64 n, F f) {
  strided(context, n, f);
  context.barrier();
}

// f() on one thread, between two barriers: the first so that nobody still reads what f changes. Constant time only.
template <class Context, class F>
BLINK_FN void leader(Context& context, F f) {
  context.barrier();
  if (context.thread() == 0) f();
  context.barrier();
}

template <class Context>
BLINK_FN u64 sum(Context& context, u64 value) {
  return context.sum(value);
}

// use(i, sum of value(j) for j < i) for each i < n; returns the whole sum. value(i) and use(i, ...) run on one
// thread, in that order; use(i) may overwrite what value(j) read for j <= i, and must not change value(j) for j > i.
template <class Context, class Value, class Use>
BLINK_FN u64 scan(Context& context, u32 n, Value value, Use use) {
  u64 base = 0;
  for (u32 tile = 0; tile < n; tile += context.threads()) {
    const u32 i = tile + context.thread();
    const Scan scan = context.exclusive(i < n ? value(i) : 0);
    if (i < n) use(i, base + scan.before);
    base += scan.total;
  }
  context.barrier();
  return base;
}

// Gives each i < n its place in key(i)'s range, in order: use(i, base, before), where take(key, amount) has returned
// `base` and `before` sums amount(j) of that key's indices since. take is called by one thread for each key of a tile,
// with the tile's sum, so that it may count; key(i), amount(i) and use(i, ...) run on one thread, in that order.
// Keys are below `keys`, which is at most kMaxKeys.
inline constexpr u32 kMaxKeys = 256;

template <class Context, class Key, class Amount, class Take, class Use>
BLINK_FN void claim(Context& context, u32 n, u32 keys, Key key, Amount amount, Take take, Use use) {
  for (u32 tile = 0; tile < n; tile += context.threads()) {
    const u32 i = tile + context.thread();
    const bool active = i < n;
    const u32 mine = active ? key(i) : 0;
    const u64 wanted = active ? amount(i) : 0;
    const Claimed claimed = context.claim(mine, wanted, keys, active, take);
    if (active) use(i, claimed.base, claimed.before);
  }
  context.barrier();
}

// f(i) for each i < n; indices of one key run on one thread, in rising order, so f may count within its key.
template <class Context, class Key, class F>
BLINK_FN void by_key(Context& context, u32 n, Key key, F f) {
  for (u32 i = 0; i < n; ++i) {
    if (context.threads() == 1 || key(i) % context.threads() == context.thread()) f(i);
  }
  context.barrier();
}

inline constexpr u32 kNone = 0xFFFFFFFF;

// The first i in [from, n) with test(i), or kNone.
template <class Context, class Test>
BLINK_FN u32 find_first(Context& context, u32 from, u32 n, Test test) {
  for (u32 tile = from; tile < n; tile += context.threads()) {
    const u32 i = tile + context.thread();
    const u32 found = context.min(i < n && test(i) ? i : kNone);
    if (found != kNone) return found;
  }
  return kNone;
}

// The last i < n with test(i), or kNone.
template <class Context, class Test>
BLINK_FN u32 find_last(Context& context, u32 n, Test test) {
  const u32 reversed = find_first(context, 0, n, [&](u32 i) { return test(n - 1 - i); });
  return reversed == kNone ? kNone : n - 1 - reversed;
}

}  // namespace blink::core

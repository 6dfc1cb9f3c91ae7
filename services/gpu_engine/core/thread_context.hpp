// A team of real threads with barriers: the stand-in for a GPU thread block that host tools can watch.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "services/gpu_engine/core/context.hpp"

namespace blink::core {

class ThreadTeam {
 public:
  explicit ThreadTeam(u32 threads) : threads_(threads), values_(threads) {}

  // Calls f(context) on every thread of the team, the caller's included, and waits for all.
  template <class F>
  void run(F f);

 private:
  friend class ThreadContext;

  // Sleeps rather than spins: tests run on machines with fewer cores than threads.
  void barrier() {
    std::unique_lock lock(mutex_);
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++generation_;
      all_here_.notify_all();
      return;
    }
    const u64 mine = generation_;
    all_here_.wait(lock, [&] { return generation_ != mine; });
  }

  const u32 threads_;
  std::vector<u64> values_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  u32 arrived_ = 0;
  u64 generation_ = 0;
};

class ThreadContext {
 public:
  ThreadContext(ThreadTeam& team, u32 thread) : team_(team), thread_(thread) {}

  u32 thread() const { return thread_; }
  u32 threads() const { return team_.threads_; }
  void barrier() { team_.barrier(); }

  Scan exclusive(u64 value) {
    exchange(value);
    Scan scan{0, 0};
    for (u32 i = 0; i < threads(); ++i) {
      if (i < thread_) scan.before += team_.values_[i];
      scan.total += team_.values_[i];
    }
    barrier();
    return scan;
  }

  u64 sum(u64 value) { return exclusive(value).total; }

  template <class Take>
  Claimed claim(u32 key, u64 amount, u32, bool active, Take take) {
    Claimed claimed{0, 0};
    for (u32 turn = 0; turn < threads(); ++turn) {
      if (turn == thread_ && active) claimed.base = take(key, amount);
      barrier();
    }
    return claimed;
  }

  u32 min(u32 value) {
    exchange(value);
    u64 least = value;
    for (const u64 other : team_.values_) least = smaller(least, other);
    barrier();
    return static_cast<u32>(least);
  }

 private:
  void exchange(u64 value) {
    team_.values_[thread_] = value;
    barrier();
  }

  ThreadTeam& team_;
  const u32 thread_;
};

template <class F>
void ThreadTeam::run(F f) {
  std::vector<std::thread> others;
  for (u32 i = 1; i < threads_; ++i) {
    others.emplace_back([this, &f, i] {
      ThreadContext context(*this, i);
      f(context);
    });
  }
  ThreadContext context(*this, 0);
  f(context);
  for (std::thread& other : others) other.join();
}

}  // namespace blink::core

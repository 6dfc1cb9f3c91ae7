// A few threads that run one loop together.
//
// The caller works too, and a loop ends as soon as its work is done: a worker that was asleep or descheduled is not
// waited for. Workers spin briefly after a loop, because a forward pass is hundreds of loops a few microseconds apart,
// and then sleep, so an idle engine uses no CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace blink::cpu {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  // `threads` in all, the caller's included.
  explicit ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~ThreadPool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end, thread) over [0, count) in pieces of whole `grain`s, on all threads; thread < threads().
  // Rethrows what a body throws, once all threads have left; pieces not begun by then are left out.
  // Pieces shrink towards the end, so that a thread whose core was taken away holds up little. One caller at a time.
  template <class Body>
  void run(int64_t count, int64_t grain, const Body& body) {
    if (count <= grain || workers_.empty()) {
      if (count > 0) body(int64_t{0}, count, 0);
      return;
    }
    next_.store(0, std::memory_order_relaxed);
    const int threads = this->threads();
    auto share = [&](int thread) {
      try {
        for (;;) {
          int64_t begin = next_.load(std::memory_order_relaxed), end;
          do {
            if (begin >= count) return;
            const int64_t fair = (count - begin) / (2 * threads) / grain * grain;
            end = std::min(count, begin + std::max(fair, grain));
          } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
          body(begin, end, thread);
        }
      } catch (...) {  // the caller hears of it once everyone has left
        next_.store(count, std::memory_order_relaxed);
        std::lock_guard lock(mutex_);
        failure_ = std::current_exception();
      }
    };
    task_ = [](const void* context, int thread) { (*static_cast<const decltype(share)*>(context))(thread); };
    context_ = &share;
    open();
    share(0);
    close();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31;  // below it: threads inside; above: number of the loop
  static constexpr auto kSpin = std::chrono::microseconds(200);

  void open() {
    const uint64_t loop = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(loop << 32 | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }

  void close() {
    uint64_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (state & (kOpen - 1)) != 0; ++spins) {
      if (spins < 1000)
        relax();
      else
        std::this_thread::yield();
      state = state_.load(std::memory_order_acquire);
    }
  }

  void work(int thread) {
    uint64_t seen = 0;
    while (wait(seen)) {
      uint64_t state = state_.load(std::memory_order_relaxed);
      while ((state & kOpen) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
      }
      seen = state >> 32;
      if (!(state & kOpen)) continue;
      task_(context_, thread);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Until there is a loop after `seen`; false when the pool ends.
  bool wait(uint64_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        if (state_.load(std::memory_order_relaxed) >> 32 != seen) return true;
        relax();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return stopping_ || state_.load(std::memory_order_seq_cst) >> 32 != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return !stopping_;
  }

  std::vector<std::thread> workers_;
  void (*task_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr failure_;
  bool stopping_ = false;
};

}  // namespace blink::cpu

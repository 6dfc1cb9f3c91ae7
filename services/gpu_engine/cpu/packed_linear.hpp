// Weights and scratch memory of the _kernels module: huge-page arenas, and packed matrices as Python hands them over.
#pragma once

#include <nanobind/ndarray.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "services/gpu_engine/cpu/weights.hpp"

namespace blink::cpu {

using Bytes = nanobind::ndarray<const uint8_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Scales = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Floats on a cache-line boundary, grown when asked for more.
class Buffer {
 public:
  float* floats(size_t count) {
    if (count > size_) {
      data_.reset(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> data_;
  size_t size_ = 0;
};

// Memory for weights, in huge pages where the system has them: a forward pass walks through all of it.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (auto [start, size] : chunks_) munmap(start, size);
  }

  // Zeroed, on a cache line, with slack behind that prefetching may touch.
  uint8_t* take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > left_) {
      const size_t size = (std::max(bytes, kChunk) + kHugePage - 1) / kHugePage * kHugePage;
      void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (start == MAP_FAILED) throw std::bad_alloc();
      madvise(start, size, MADV_HUGEPAGE);
      chunks_.emplace_back(start, size);
      next_ = static_cast<uint8_t*>(start);
      left_ = size;
    }
    uint8_t* taken = next_;
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20, kChunk = size_t{64} << 20;
  std::vector<std::pair<void*, size_t>> chunks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

// One or several packed matrices with the same inputs; their outputs lie side by side. The memory is the arena's.
class Linear {
 public:
  Linear(Arena& arena, const std::vector<Bytes>& rows, const std::vector<std::string>& types,
         const std::vector<int>& inputs, const std::vector<std::optional<Scales>>& scales) {
    require(!rows.empty() && rows.size() == types.size() && rows.size() == inputs.size(),
            "Linear takes as many types and inputs as matrices, at least one");
    require(scales.empty() || scales.size() == rows.size(), "Linear takes as many scales as matrices, or none");
    for (size_t i = 0; i < rows.size(); ++i) {
      require(inputs[i] == inputs[0], "matrices of one Linear must have the same inputs");
      Weight weight{type_of(types[i]), static_cast<int>(rows[i].shape(0)), inputs[i], nullptr};
      const bool scaled = !scales.empty() && scales[i];
      require(scaled == (weight.type == WeightType::kF8), "F8_E4M3 matrices have scales, no others");
      require(!scaled || (static_cast<int>(scales[i]->shape(0)) == weight.outputs &&
                          static_cast<int>(scales[i]->shape(1)) == weight.blocks()),
              "scales must be [outputs, blocks of 32 inputs]");
      const size_t bytes = weight.panels() * weight.panel_bytes();
      uint8_t* panels = arena.take(bytes);
      pack(weight, rows[i].data(), rows[i].shape(1), scaled ? scales[i]->data() : nullptr, panels);
      weight.data = panels;
      weights_.push_back(weight);
      outputs_ += weight.outputs;
      panels_ += weight.panels();
      bytes_ += bytes;
    }
  }

  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  int inputs() const { return weights_[0].inputs; }
  int outputs() const { return outputs_; }
  int panels() const { return panels_; }
  size_t bytes() const { return bytes_; }
  const Weight& only() const {
    require(weights_.size() == 1, "rows can be taken of a single matrix only");
    return weights_[0];
  }

  // visit(weight, first panel, panels, column of its output 0) for each matrix that panels [begin, end) touch.
  template <class Visit>
  void each(int begin, int end, const Visit& visit) const {
    int before = 0, column = 0;
    for (const Weight& weight : weights_) {
      const int first = std::max(begin - before, 0), last = std::min(end - before, weight.panels());
      if (first < last) visit(weight, first, last - first, column);
      before += weight.panels();
      column += weight.outputs;
    }
  }

 private:
  static WeightType type_of(const std::string& name) {
    const char* names[] = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "F8_E4M3"};
    for (int i = 0; i < 7; ++i)
      if (name == names[i]) return static_cast<WeightType>(i);
    throw std::invalid_argument("unknown weight type " + name);
  }

  std::vector<Weight> weights_;
  int outputs_ = 0, panels_ = 0;
  size_t bytes_ = 0;
};

// Matrices of one shape, one for each expert of a mixture.
class LinearGroup {
 public:
  explicit LinearGroup(Arena& arena) : arena_(arena) {}
  LinearGroup(const LinearGroup&) = delete;
  LinearGroup& operator=(const LinearGroup&) = delete;

  void append(const std::vector<Bytes>& rows, const std::vector<std::string>& types, const std::vector<int>& inputs,
              const std::vector<std::optional<Scales>>& scales) {
    auto linear = std::make_unique<Linear>(arena_, rows, types, inputs, scales);
    require(
        members_.empty() || (linear->inputs() == members_[0]->inputs() && linear->outputs() == members_[0]->outputs()),
        "matrices of one LinearGroup must have the same shape");
    members_.push_back(std::move(linear));
  }

  int size() const { return static_cast<int>(members_.size()); }
  const Linear& operator[](int index) const { return *members_[index]; }

 private:
  Arena& arena_;
  std::vector<std::unique_ptr<Linear>> members_;
};

}  // namespace blink::cpu

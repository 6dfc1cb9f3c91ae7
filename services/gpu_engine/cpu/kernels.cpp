// The _kernels module: the operations that forward.py strings together, each spread over the pool's threads.
//
// Matrices are row-major float32 numpy arrays; `tokens` says how many of their first rows count.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "services/gpu_engine/cpu/float8.hpp"
#include "services/gpu_engine/cpu/kernel_table.hpp"
#include "services/gpu_engine/cpu/mixture.hpp"
#include "services/gpu_engine/cpu/packed_linear.hpp"
#include "services/gpu_engine/cpu/philox.hpp"
#include "services/gpu_engine/cpu/sampling.hpp"
#include "services/gpu_engine/cpu/thread_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace blink::cpu {
namespace {

using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Probabilities = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TopTokens = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Chosen = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The threads, the instruction set and the scratch memory of one engine.
class Kernels {
 public:
  Kernels(int threads, const std::string& instruction_set)
      : table_(kernel_table(instruction_set.empty() ? nullptr : instruction_set.c_str())),
        pool_(threads),
        scratch_(threads),
        sampling_(threads) {
    require(threads >= 1, "threads must be at least 1");
    if (!table_) throw std::invalid_argument("this CPU has no " + instruction_set);
  }

  std::string instruction_set() const { return table_->name; }
  int threads() const { return pool_.threads(); }

  // out[t] = weight.row(ids[t])
  void embed(const Linear& linear, Integers ids, int tokens, Matrix out) {
    const Weight& weight = linear.only();
    require(tokens <= static_cast<int>(ids.shape(0)) && tokens <= static_cast<int>(out.shape(0)), "tokens");
    require(static_cast<int>(out.shape(1)) == weight.inputs, "embed: out is not as wide as the embedding");
    const size_t panel = static_cast<size_t>(weight.blocks()) * kBlockInputs * kPanelOutputs;
    pool_.run(tokens, 4, [&](int64_t begin, int64_t end, int thread) {
      float* expanded = scratch_[thread].floats(panel);
      for (int64_t t = begin; t < end; ++t) {
        const int id = ids.data()[t];
        if (id < 0 || id >= weight.outputs) continue;  // the scheduler has checked; never read outside
        table_->expand_panels(weight, id / kPanelOutputs, 1, expanded);
        float* row = out.data() + t * weight.inputs;
        for (int k = 0; k < weight.inputs; ++k) row[k] = expanded[k * kPanelOutputs + id % kPanelOutputs];
      }
    });
  }

  // out (+)= in @ weights.T, over all matrices of `linear`.
  void linear(const Linear& linear, Matrix in, int tokens, Matrix out, bool accumulate) {
    require(tokens <= static_cast<int>(in.shape(0)), "tokens");
    multiply_all({{&linear, 0, tokens}}, in, out, accumulate);
  }

  // out rows = in rows @ weights.T for the rows [row_start[e], row_start[e + 1]) of each member e: its weights are read
  // once however many rows it has.
  void grouped_linear(const LinearGroup& group, Integers row_start, Matrix in, Matrix out) {
    require(static_cast<int>(row_start.shape(0)) == group.size() + 1, "row_start has one entry more than the group");
    std::vector<Product> products;
    for (int e = 0; e < group.size(); ++e) {
      const int first = row_start.data()[e], rows = row_start.data()[e + 1] - first;
      require(first >= 0 && rows >= 0 && first + rows <= static_cast<int>(in.shape(0)), "row_start");
      if (rows > 0) products.push_back({&group[e], first, rows});
    }
    if (!products.empty()) multiply_all(std::move(products), in, out, false);
  }

  // The experts of each token and their weights, see mixture.hpp.
  void route(Matrix logits, int tokens, bool normalized, Chosen experts, Matrix weights) {
    const int count = static_cast<int>(logits.shape(1)), chosen = static_cast<int>(experts.shape(1));
    require(chosen <= count && weights.shape(1) == experts.shape(1), "route: widths");
    require(tokens <= static_cast<int>(logits.shape(0)) && tokens <= static_cast<int>(experts.shape(0)) &&
                tokens <= static_cast<int>(weights.shape(0)),
            "tokens");
    pool_.run(tokens, grain(8 * count), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        choose_experts(logits.data() + t * count, count, chosen, normalized, experts.data() + t * chosen,
                       weights.data() + t * chosen);
    });
  }

  // out[t] += sum of weights[t, k] * rows[places[t, k]], in the order of k.
  void combine(Matrix rows, Table places, Weights weights, int tokens, Matrix out) {
    const int width = static_cast<int>(out.shape(1)), chosen = static_cast<int>(places.shape(1));
    require(rows.shape(1) == out.shape(1) && weights.shape(1) == places.shape(1), "combine: widths");
    require(tokens <= static_cast<int>(places.shape(0)) && tokens <= static_cast<int>(weights.shape(0)) &&
                tokens <= static_cast<int>(out.shape(0)),
            "tokens");
    for (int i = 0; i < tokens * chosen; ++i)
      require(places.data()[i] >= 0 && places.data()[i] < static_cast<int>(rows.shape(0)), "combine: places");
    pool_.run(tokens, grain(chosen * width), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        add_weighted(rows.data(), places.data() + t * chosen, weights.data() + t * chosen, chosen, width,
                     out.data() + t * width);
    });
  }

  void rms_norm(Matrix in, Vector weight, float epsilon, int tokens, Matrix out) {
    const int width = static_cast<int>(in.shape(1));
    require(tokens <= static_cast<int>(in.shape(0)) && tokens <= static_cast<int>(out.shape(0)), "tokens");
    require(static_cast<int>(out.shape(1)) == width && static_cast<int>(weight.shape(0)) == width, "rms_norm: widths");
    pool_.run(tokens, grain(width), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        table_->rms_norm(in.data() + t * width, weight.data(), epsilon, width, out.data() + t * width);
    });
  }

  // in: gate and up side by side; out = silu(gate) * up
  void swiglu(Matrix in, int tokens, Matrix out) {
    const int width = static_cast<int>(out.shape(1));
    require(tokens <= static_cast<int>(in.shape(0)) && tokens <= static_cast<int>(out.shape(0)), "tokens");
    require(static_cast<int>(in.shape(1)) == 2 * width, "swiglu: in is not twice as wide as out");
    pool_.run(tokens, grain(4 * width), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const float* row = in.data() + t * 2 * width;
        table_->swiglu(row, row + width, width, out.data() + t * width);
      }
    });
  }

  // Norms each head of queries and keys where weights are given, rotates queries (in place) and keys of `qkv` by each
  // token's angles, and stores keys and values in the cache, with `fp8_scales` rounded to what e4m3 can hold of them
  // once divided by the key's and the value's scale. slots[t] = page * page_size + offset.
  void rotate_and_store(Matrix qkv, int heads, Matrix cosines, Matrix sines, Integers slots, int tokens, Floats keys,
                        Floats values, std::optional<Vector> query_norm, std::optional<Vector> key_norm, float epsilon,
                        std::optional<std::pair<float, float>> fp8_scales) {
    const KvCache cache = cache_of(keys, values);
    const int d = cache.head_dim, width = (heads + 2 * cache.kv_heads) * d;
    require(tokens <= static_cast<int>(qkv.shape(0)) && tokens <= static_cast<int>(slots.shape(0)), "tokens");
    require(tokens <= static_cast<int>(cosines.shape(0)) && tokens <= static_cast<int>(sines.shape(0)), "tokens");
    const int half = static_cast<int>(cosines.shape(1));
    require(half <= d / 2 && cosines.shape(1) == sines.shape(1), "rotate: angles are wider than half a head");
    for (const auto& norm : {query_norm, key_norm})
      require(!norm || static_cast<int>(norm->shape(0)) == d, "rotate: a norm is not as wide as a head");
    require(static_cast<int>(qkv.shape(1)) == width, "rotate: qkv does not hold the heads");
    pool_.run(tokens, grain(4 * width), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = qkv.data() + t * width;
        float* key = row + heads * d;
        for (int h = 0; query_norm && h < heads; ++h)
          table_->rms_norm(row + h * d, query_norm->data(), epsilon, d, row + h * d);
        for (int h = 0; key_norm && h < cache.kv_heads; ++h)
          table_->rms_norm(key + h * d, key_norm->data(), epsilon, d, key + h * d);
        table_->rotate(row, heads + cache.kv_heads, d, half, cosines.data() + t * half, sines.data() + t * half);
        if (fp8_scales) {
          const int kv = cache.kv_heads * d;
          for (int i = 0; i < kv; ++i) key[i] = round_to_e4m3(key[i] / fp8_scales->first) * fp8_scales->first;
          for (int i = kv; i < 2 * kv; ++i) key[i] = round_to_e4m3(key[i] / fp8_scales->second) * fp8_scales->second;
        }
        const int page = slots.data()[t] / cache.page_size, offset = slots.data()[t] % cache.page_size;
        for (int h = 0; h < cache.kv_heads; ++h) {
          float* key_page = cache.keys + cache.offset(page, h) + offset;
          float* value = cache.values + cache.offset(page, h) + static_cast<size_t>(offset) * d;
          for (int i = 0; i < d; ++i) key_page[static_cast<size_t>(i) * cache.page_size] = key[h * d + i];
          std::copy_n(key + (cache.kv_heads + h) * d, d, value);
        }
      }
    });
  }

  // out[t] = attention of the queries of qkv[t] over lengths[t] positions of the pages in page_table[sequences[t]].
  void attend(Matrix qkv, int heads, Integers lengths, Integers sequences, Table page_table, int tokens, Floats keys,
              Floats values, Matrix out) {
    const KvCache cache = cache_of(keys, values);
    const int d = cache.head_dim, group = heads / cache.kv_heads;
    require(tokens <= static_cast<int>(qkv.shape(0)) && tokens <= static_cast<int>(out.shape(0)), "tokens");
    require(tokens <= static_cast<int>(lengths.shape(0)) && tokens <= static_cast<int>(sequences.shape(0)), "tokens");
    require(heads % cache.kv_heads == 0 && static_cast<int>(out.shape(1)) == heads * d, "attend: out width");
    require(static_cast<int>(qkv.shape(1)) == (heads + 2 * cache.kv_heads) * d, "attend: qkv width");
    // Heads of a group share loads of keys and values; with few tokens they are split to keep all threads busy.
    const int together = tokens * cache.kv_heads >= 4 * threads() ? group : 1;
    const int pieces = heads / together;
    const size_t positions = page_table.shape(1) * cache.page_size;
    pool_.run(static_cast<int64_t>(tokens) * pieces, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i / pieces;
        const int head = static_cast<int>(i % pieces) * together;
        float* scratch = scratch_[thread].floats(std::min(together, 4) * positions);
        table_->attend(cache, page_table.data() + sequences.data()[t] * page_table.shape(1), lengths.data()[t],
                       head / group, qkv.data() + t * qkv.shape(1) + head * d, together, scratch,
                       out.data() + t * out.shape(1) + head * d);
      }
    });
  }

  // One token for each of the first `samples` rows of logits; see sampling.hpp. sampling: [samples, sizeof
  // RowSampling].
  void sample(Matrix logits, int samples, Bytes sampling, Words history, Tokens tokens, Probabilities logprobs,
              TopTokens top_tokens, Matrix top_logprobs) {
    const auto count = static_cast<size_t>(samples);
    require(sampling.shape(1) == sizeof(core::RowSampling), "sampling must be RowSampling");
    require(count <= logits.shape(0) && count <= sampling.shape(0) && count <= tokens.shape(0) &&
                count <= logprobs.shape(0) && count <= top_tokens.shape(0) && count <= top_logprobs.shape(0),
            "samples");
    require(top_tokens.shape(1) == ring::kMaxTopLogprobs && top_logprobs.shape(1) == ring::kMaxTopLogprobs,
            "top_tokens and top_logprobs must be MAX_TOP_LOGPROBS wide");
    const auto* rows = reinterpret_cast<const core::RowSampling*>(sampling.data());
    for (size_t i = 0; i < count; ++i) {
      require(rows[i].history_offset + rows[i].history_length <= history.shape(0), "history is too short");
      require(rows[i].top_logprobs <= ring::kMaxTopLogprobs && rows[i].suppress_count <= core::kMaxEndTokens,
              "RowSampling counts");
    }
    const int vocabulary = static_cast<int>(logits.shape(1));
    pool_.run(samples, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        const Sampled result{tokens.data() + i, logprobs.data() + i, top_tokens.data() + i * top_tokens.shape(1),
                             top_logprobs.data() + i * top_logprobs.shape(1)};
        cpu::sample(*table_, logits.data() + i * logits.shape(1), vocabulary, rows[i],
                    history.data() + rows[i].history_offset, sampling_[thread], result);
      }
    });
  }

 private:
  // Rows that are worth waking a thread for.
  static int64_t grain(int width) { return std::max(1, 16384 / std::max(width, 1)); }

  static KvCache cache_of(const Floats& keys, const Floats& values) {
    require(keys.ndim() == 4 && values.ndim() == 4 && keys.shape(1) == values.shape(1) &&
                keys.shape(2) == values.shape(3) && keys.shape(3) == values.shape(2),
            "keys must be [pages, kv_heads, head_dim, page_size], values [pages, kv_heads, page_size, head_dim]");
    require(keys.shape(2) % 16 == 0 && keys.shape(3) % 16 == 0, "head_dim and page_size must be multiples of 16");
    return {keys.data(), values.data(), static_cast<int>(keys.shape(1)), static_cast<int>(keys.shape(2)),
            static_cast<int>(keys.shape(3))};
  }

  // A matrix, and the consecutive rows of the input and output that belong to it.
  struct Product {
    const Linear* linear;
    int first_row;
    int rows;
    const float* tiles = nullptr;
  };

  // All products in one loop over the threads; their matrices have the same shape.
  void multiply_all(std::vector<Product> products, Matrix in, Matrix out, bool accumulate) {
    const Linear& shape = *products[0].linear;
    const int inputs = shape.inputs(), tallest = table_->tallest_tile;
    require(products.back().first_row + products.back().rows <= static_cast<int>(out.shape(0)), "tokens");
    require(static_cast<int>(in.shape(1)) == inputs, "linear: in is not as wide as the matrix's inputs");
    require(static_cast<int>(out.shape(1)) == shape.outputs(), "linear: out is not as wide as the matrix's outputs");
    const int padded = (inputs + kBlockInputs - 1) / kBlockInputs * kBlockInputs;
    pack_rows(products, in, padded);
    const int64_t panels = shape.panels();
    pool_.run(panels * static_cast<int64_t>(products.size()), 1, [&](int64_t begin, int64_t end, int thread) {
      while (begin < end) {
        const Product& product = products[begin / panels];
        const int64_t first = begin % panels;
        const int64_t last = std::min({panels, first + kMaxExpandedPanels, first + end - begin});
        // With more tiles than this, panels are dequantized to memory once rather than in registers for each tile.
        const bool expand = product.rows > 2 * tallest;
        float* target = out.data() + static_cast<size_t>(product.first_row) * out.shape(1);
        product.linear->each(static_cast<int>(first), static_cast<int>(last),
                             [&](const Weight& weight, int panel, int count, int column) {
                               multiply(weight, panel, count, product.tiles, padded, product.rows, expand, thread,
                                        {target + column, out.shape(1), accumulate});
                             });
        begin += last - first;
      }
    });
  }

  // Sets each product's tiles of activations; a single row of whole blocks is one as it lies.
  void pack_rows(std::vector<Product>& products, Matrix in, int padded) {
    const int inputs = static_cast<int>(in.shape(1)), tallest = table_->tallest_tile;
    struct Tile {
      int row, rows;
    };
    std::vector<Tile> tiles;
    std::vector<size_t> first_tile;
    for (const Product& product : products) {
      first_tile.push_back(tiles.size());
      if (product.rows == 1 && padded == inputs) continue;
      for (int row = 0; row < product.rows; row += tallest)
        tiles.push_back({product.first_row + row, std::min(tallest, product.rows - row)});
    }
    const size_t tile_floats = static_cast<size_t>(tallest) * padded;
    float* packed = tiles_.floats(std::max<size_t>(tiles.size(), 1) * tile_floats);
    pool_.run(static_cast<int64_t>(tiles.size()), 2, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        table_->pack_activations(in.data() + static_cast<size_t>(tiles[i].row) * inputs, inputs, tiles[i].rows, inputs,
                                 packed + i * tile_floats);
    });
    for (size_t i = 0; i < products.size(); ++i) {
      const bool as_it_lies = products[i].rows == 1 && padded == inputs;
      products[i].tiles = as_it_lies ? in.data() + static_cast<size_t>(products[i].first_row) * inputs
                                     : packed + first_tile[i] * tile_floats;
    }
  }

  void multiply(const Weight& weight, int panel, int panels, const float* tiles, int padded, int tokens, bool expand,
                int thread, OutputTile out) {
    Weight source = weight;
    int first = panel;
    if (expand) {
      float* expanded = scratch_[thread].floats(static_cast<size_t>(panels) * padded * kPanelOutputs);
      table_->expand_panels(weight, panel, panels, expanded);
      const int outputs = std::min(panels * kPanelOutputs, weight.outputs - panel * kPanelOutputs);
      source = {WeightType::kF32, outputs, weight.inputs, reinterpret_cast<const uint8_t*>(expanded)};
      first = 0;
      out.values += panel * kPanelOutputs;
    }
    float* start = out.values;
    for (int row = 0; row < tokens; row += table_->tallest_tile) {
      out.values = start + row * out.stride;
      const ActivationTile in{tiles + static_cast<size_t>(row) * padded, std::min(table_->tallest_tile, tokens - row)};
      table_->multiply_panels(source, first, panels, in, out);
    }
  }

  const KernelTable* table_;
  ThreadPool pool_;
  std::vector<Buffer> scratch_;
  std::vector<SamplingScratch> sampling_;
  Buffer tiles_;
};

}  // namespace
}  // namespace blink::cpu

NB_MODULE(_kernels, m) {
  using namespace blink::cpu;
  m.def(
      "philox",
      [](uint64_t key, const std::vector<uint32_t>& counter) {
        require(counter.size() == 4, "the counter has four words");
        const PhiloxBlock block = philox(key, {{counter[0], counter[1], counter[2], counter[3]}});
        return std::vector<uint32_t>(block.word, block.word + 4);
      },
      "key"_a, "counter"_a);
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<Linear>(m, "Linear")
      .def(nb::init<Arena&, const std::vector<Bytes>&, const std::vector<std::string>&, const std::vector<int>&,
                    const std::vector<std::optional<Scales>>&>(),
           nb::keep_alive<1, 2>(), "arena"_a, "rows"_a, "types"_a, "inputs"_a, "scales"_a = nb::list())
      .def_prop_ro("inputs", &Linear::inputs)
      .def_prop_ro("outputs", &Linear::outputs)
      .def_prop_ro("bytes", &Linear::bytes);
  nb::class_<LinearGroup>(m, "LinearGroup")
      .def(nb::init<Arena&>(), nb::keep_alive<1, 2>(), "arena"_a)
      .def("append", &LinearGroup::append, "rows"_a, "types"_a, "inputs"_a, "scales"_a = nb::list())
      .def("__len__", &LinearGroup::size);
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<int, const std::string&>(), "threads"_a, "instruction_set"_a = "")
      .def_prop_ro("instruction_set", &Kernels::instruction_set)
      .def_prop_ro("threads", &Kernels::threads)
      .def("embed", &Kernels::embed, "linear"_a, "ids"_a, "tokens"_a, "out"_a, Release())
      .def("linear", &Kernels::linear, "linear"_a, "inputs"_a, "tokens"_a, "out"_a, "accumulate"_a = false, Release())
      .def("grouped_linear", &Kernels::grouped_linear, "group"_a, "row_start"_a, "inputs"_a, "out"_a, Release())
      .def("route", &Kernels::route, "logits"_a, "tokens"_a, "normalized"_a, "experts"_a, "weights"_a, Release())
      .def("combine", &Kernels::combine, "rows"_a, "places"_a, "weights"_a, "tokens"_a, "out"_a, Release())
      .def("rms_norm", &Kernels::rms_norm, "inputs"_a, "weight"_a, "epsilon"_a, "tokens"_a, "out"_a, Release())
      .def("swiglu", &Kernels::swiglu, "inputs"_a, "tokens"_a, "out"_a, Release())
      .def("rotate_and_store", &Kernels::rotate_and_store, "qkv"_a, "heads"_a, "cosines"_a, "sines"_a, "slots"_a,
           "tokens"_a, "keys"_a, "values"_a, "query_norm"_a = nb::none(), "key_norm"_a = nb::none(), "epsilon"_a = 0.0f,
           "fp8_scales"_a = nb::none(), Release())
      .def("attend", &Kernels::attend, "qkv"_a, "heads"_a, "lengths"_a, "sequences"_a, "page_table"_a, "tokens"_a,
           "keys"_a, "values"_a, "out"_a, Release())
      .def("sample", &Kernels::sample, "logits"_a, "samples"_a, "sampling"_a, "history"_a, "tokens"_a, "logprobs"_a,
           "top_tokens"_a, "top_logprobs"_a, Release());
}

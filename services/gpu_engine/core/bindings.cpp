// The scheduling core for Python: services.gpu_engine.core._core. Signatures and shapes are in _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>
#include <vector>

#include "services/gpu_engine/core/audit.hpp"
#include "services/gpu_engine/core/host_scheduler.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace blink::core;
namespace ring = blink::ring;

namespace {

using RingArray = nb::ndarray<u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T, int Dimensions>
using Result = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

Config make_config(u32 page_size, u32 page_count, u32 max_running, u32 max_batched_tokens, u32 max_waiting,
                   u32 priority_boost, u64 lease_us, bool prefix_cache, bool share_decoded, u64 cache_seed,
                   const std::vector<u32>& eos_token_ids) {
  Config config{page_size, page_count, max_running,  max_batched_tokens, max_waiting, priority_boost,
                lease_us,  cache_seed, prefix_cache, share_decoded,      0,           {}};
  require("number of eos_token_ids", eos_token_ids.size(), 0, kMaxEosTokens);
  for (const u32 token : eos_token_ids) config.eos[config.eos_count++] = token;
  check(config);
  return config;
}

// The step's arrays as numpy sees them: whole ones made once, the used part sliced on demand.
class StepView {
 public:
  StepView(const State& state, const std::shared_ptr<void>& memory) : state_(state) {
    auto* owner = new std::shared_ptr<void>(memory);
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    const Config& config = state.config;
    const Step& step = state.step;
    token_ids = array(step.token_ids, {config.max_batched_tokens}, capsule);
    positions = array(step.positions, {config.max_batched_tokens}, capsule);
    row_start = array(step.row_start, {config.max_running + 1}, capsule);
    kv_length = array(step.kv_length, {config.max_running}, capsule);
    sequence = array(step.sequence, {config.max_running}, capsule);
    page_table = array(step.page_table, {config.max_running, state.pages_per_sequence}, capsule);
    sample_row = array(step.sample_row, {config.max_running}, capsule);
    request = array(step.request, {config.max_running}, capsule);
    history = array(state.history, {state.ring.info.lanes * state.ring.arena_words()}, capsule);
    const nb::object bytes =
        array(reinterpret_cast<u8*>(step.sampling), {config.max_running, sizeof(RowSampling)}, capsule);
    sampling = bytes.attr("view")(sampling_dtype()).attr("reshape")(-1);
  }

  static nb::object sampling_dtype() {
    nb::dict fields;
    nb::list names, formats, offsets;
    const auto field = [&](const char* name, nb::object format, std::size_t offset) {
      names.append(name);
      formats.append(format);
      offsets.append(offset);
    };
    const nb::object u4 = nb::str("<u4"), u8_ = nb::str("<u8"), f4 = nb::str("<f4");
    field("seed", u8_, offsetof(RowSampling, seed));
    field("history_offset", u8_, offsetof(RowSampling, history_offset));
    field("history_length", u4, offsetof(RowSampling, history_length));
    field("prompt_tokens", u4, offsetof(RowSampling, prompt_tokens));
    field("temperature", f4, offsetof(RowSampling, temperature));
    field("top_p", f4, offsetof(RowSampling, top_p));
    field("min_p", f4, offsetof(RowSampling, min_p));
    field("repetition_penalty", f4, offsetof(RowSampling, repetition_penalty));
    field("presence_penalty", f4, offsetof(RowSampling, presence_penalty));
    field("frequency_penalty", f4, offsetof(RowSampling, frequency_penalty));
    field("top_k", u4, offsetof(RowSampling, top_k));
    field("top_logprobs", u4, offsetof(RowSampling, top_logprobs));
    field("logprobs", u4, offsetof(RowSampling, logprobs));
    field("suppress_count", u4, offsetof(RowSampling, suppress_count));
    field("suppress", nb::make_tuple("<u4", kMaxEndTokens), offsetof(RowSampling, suppress));
    fields["names"] = names;
    fields["formats"] = formats;
    fields["offsets"] = offsets;
    fields["itemsize"] = sizeof(RowSampling);
    return nb::module_::import_("numpy").attr("dtype")(fields);
  }

  static nb::object head(const nb::object& whole, u32 count) {
    return whole[nb::slice(nb::int_(0), nb::int_(count), nb::int_(1))];
  }

  u32 tokens() const { return state_.step.tokens; }
  u32 rows() const { return state_.step.rows; }
  u32 samples() const { return state_.step.samples; }

  nb::object token_ids, positions, row_start, kv_length, sequence, page_table, sample_row, sampling, request, history;

 private:
  template <class T>
  static nb::object array(T* data, std::initializer_list<std::size_t> shape, const nb::capsule& owner) {
    return nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner));
  }

  const State& state_;
};

class Scheduler {
 public:
  Scheduler(const RingArray& ring, const Config& config, u64 first_position, u32 threads,
            const std::optional<RingArray>& outbound)
      : ring_(ring),
        outbound_(outbound),
        host(ring_.data(), ring_.size(), config, first_position, threads, outbound_ ? outbound_->data() : nullptr,
             outbound_ ? outbound_->size() : 0),
        step(host.state(), host.memory()) {}

  void commit(u64 now_us, const Result<i32, 1>& tokens, const Result<float, 1>& logprobs,
              const std::optional<Result<i32, 2>>& top_tokens, const std::optional<Result<float, 2>>& top_logprobs) {
    const State& state = host.state();
    const u64 samples = state.step.samples;
    require("length of tokens", tokens.size(), samples, samples);
    require("length of logprobs", logprobs.size(), samples, samples);
    bool alternatives = false;
    for (u64 i = 0; i < samples; ++i) alternatives |= state.step.sampling[i].top_logprobs != 0;
    if (alternatives) {
      const auto check_top = [&](const char* name, const auto& array) {
        if (!array || array->shape(0) != samples || array->shape(1) != ring::kMaxTopLogprobs) {
          throw std::invalid_argument(std::string(name) + " must have shape (" + std::to_string(samples) + ", " +
                                      std::to_string(ring::kMaxTopLogprobs) + "): a row wants alternatives");
        }
      };
      check_top("top_tokens", top_tokens);
      check_top("top_logprobs", top_logprobs);
    }
    const StepResult result{tokens.data(), logprobs.data(), top_tokens ? top_tokens->data() : nullptr,
                            top_logprobs ? top_logprobs->data() : nullptr};
    const nb::gil_scoped_release release;
    host.commit(now_us, result);
  }

  // Who holds each page: -1 for nobody, else the lane's slot as lane * slots_per_lane + slot, of shared pages one of
  // them; -2 for a page that is lost, held twice though not cached, or whose references are miscounted. For tests:
  // looks at everything.
  std::vector<i32> page_owners() const {
    const State& state = host.state();
    const u32 count = state.config.page_count;
    std::vector<i32> owners(count, -1);
    std::vector<u32> free(count, 0), idle(count, 0), own(count, 0), references(count, 0);
    for (u32 i = 0; i < state.free_page_count; ++i) ++free[state.free_pages[i]];
    for (u32 i = 0; i < state.idle.length; ++i) {
      const u32 place = idle_place(state, i), page = state.idle.queue[place];
      idle[page] += state.prefixes.pages[page].idle_place == place;
    }
    for (u32 i = 0; i < state.running.count; ++i) {
      const u32 index = state.running.items[i];
      const Request& request = state.requests[index];
      for (u32 j = 0; j < request.pages; ++j) {
        const i32 page = table_line(state, request)[j];
        owners[page] = static_cast<i32>(index);
        ++(j < request.cached ? references : own)[page];
      }
    }
    for (u32 page = 0; page < count; ++page) {
      const u32 shared = references[page] != 0;
      const bool counted = !shared || references[page] == state.prefixes.pages[page].references;
      if (free[page] + idle[page] + own[page] + shared != 1 || !counted) owners[page] = -2;
    }
    return owners;
  }

  // For each cached page the tokens of the sequence whose last page it is, first those of its parents; for tests.
  std::vector<std::pair<u32, std::vector<u32>>> cached_prefixes() const {
    const State& state = host.state();
    const PrefixIndex& index = state.prefixes;
    std::vector<std::pair<u32, std::vector<u32>>> prefixes;
    for (u32 bucket = 0; bucket < index.bucket_count; ++bucket) {
      for (u32 page = index.buckets[bucket]; page != kNone; page = index.pages[page].next) {
        std::vector<u32> tokens;
        for (u32 part = page; part != kNone; part = index.pages[part].parent) {
          const u32* first = index.tokens + u64{part} * state.config.page_size;
          tokens.insert(tokens.begin(), first, first + state.config.page_size);
        }
        prefixes.emplace_back(page, std::move(tokens));
      }
    }
    return prefixes;
  }

  nb::object memory() const {
    auto* owner = new std::shared_ptr<void>(host.memory());
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, u8>(host.arrays(), {host.bytes()}, capsule));
  }

 private:
  RingArray ring_;  // keeps the memory alive
  std::optional<RingArray> outbound_;

 public:
  HostScheduler host;
  StepView step;
};

}  // namespace

NB_MODULE(_core, module) {
  module.attr("ROW_SAMPLING") = StepView::sampling_dtype();
  module.attr("MAX_EOS_TOKENS") = kMaxEosTokens;

  nb::class_<Config>(module, "SchedulerConfig")
      .def(
          "__init__",
          [](Config* self, u32 page_size, u32 page_count, u32 max_running, u32 max_batched_tokens, u32 max_waiting,
             u32 priority_boost, u64 lease_us, bool prefix_cache, bool share_decoded, u64 cache_seed,
             const std::vector<u32>& eos_token_ids) {
            new (self)
                Config(make_config(page_size, page_count, max_running, max_batched_tokens, max_waiting, priority_boost,
                                   lease_us, prefix_cache, share_decoded, cache_seed, eos_token_ids));
          },
          nb::kw_only(), "page_size"_a, "page_count"_a, "max_running"_a, "max_batched_tokens"_a, "max_waiting"_a = 1024,
          "priority_boost"_a = 32, "lease_us"_a = 5'000'000, "prefix_cache"_a = false, "share_decoded"_a = false,
          "cache_seed"_a = 0, "eos_token_ids"_a = std::vector<u32>())
      .def_ro("page_size", &Config::page_size)
      .def_ro("page_count", &Config::page_count)
      .def_ro("max_running", &Config::max_running)
      .def_ro("max_batched_tokens", &Config::max_batched_tokens)
      .def_ro("max_waiting", &Config::max_waiting)
      .def_ro("priority_boost", &Config::priority_boost)
      .def_ro("lease_us", &Config::lease_us)
      .def_prop_ro("prefix_cache", [](const Config& config) { return config.prefix_cache != 0; })
      .def_prop_ro("share_decoded", [](const Config& config) { return config.share_decoded != 0; })
      .def_prop_ro("eos_token_ids",
                   [](const Config& config) { return std::vector<u32>(config.eos, config.eos + config.eos_count); });

  nb::class_<StepView>(module, "Step")
      .def_prop_ro("tokens", &StepView::tokens)
      .def_prop_ro("rows", &StepView::rows)
      .def_prop_ro("samples", &StepView::samples)
      .def_prop_ro("token_ids", [](const StepView& s) { return s.head(s.token_ids, s.tokens()); })
      .def_prop_ro("positions", [](const StepView& s) { return s.head(s.positions, s.tokens()); })
      .def_prop_ro("row_start", [](const StepView& s) { return s.head(s.row_start, s.rows() + 1); })
      .def_prop_ro("kv_length", [](const StepView& s) { return s.head(s.kv_length, s.rows()); })
      .def_prop_ro("sequence", [](const StepView& s) { return s.head(s.sequence, s.rows()); })
      .def_prop_ro("page_table", [](const StepView& s) { return s.page_table; })
      .def_prop_ro("sample_row", [](const StepView& s) { return s.head(s.sample_row, s.samples()); })
      .def_prop_ro("sampling", [](const StepView& s) { return s.head(s.sampling, s.samples()); })
      .def_prop_ro("request", [](const StepView& s) { return s.head(s.request, s.rows()); })
      .def_prop_ro("history", [](const StepView& s) { return s.history; });

  nb::class_<Scheduler>(module, "Scheduler")
      .def(nb::init<const RingArray&, const Config&, u64, u32, const std::optional<RingArray>&>(), "ring"_a, "config"_a,
           nb::kw_only(), "first_position"_a = 0, "threads"_a = 1, "outbound"_a = nb::none())
      .def(
          "start", [](Scheduler& s, u64 epoch) { s.host.start(epoch); }, "epoch"_a)
      .def(
          "poll", [](Scheduler& s, u64 now_us) { s.host.poll(now_us); }, "now_us"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "plan", [](Scheduler& s, u64 now_us) { return s.host.plan(now_us); }, "now_us"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def("commit", &Scheduler::commit, "now_us"_a, "tokens"_a, "logprobs"_a, "top_tokens"_a = nb::none(),
           "top_logprobs"_a = nb::none())
      .def("heartbeat", [](Scheduler& s) { heartbeat(s.host.state()); })
      .def(
          "set_state",
          [](Scheduler& s, u64 engine_state) {
            require("engine state", engine_state, 1, 4);
            set_engine_state(s.host.state(), engine_state);
          },
          "state"_a)
      .def_prop_ro(
          "step", [](Scheduler& s) -> StepView& { return s.step; }, nb::rv_policy::reference_internal)
      .def_prop_ro("running", [](const Scheduler& s) { return s.host.state().running.count; })
      .def_prop_ro("waiting", [](const Scheduler& s) { return s.host.state().waiting.count; })
      .def_prop_ro("idle",
                   [](const Scheduler& s) { return s.host.state().running.count + s.host.state().waiting.count == 0; })
      .def_prop_ro("command", [](const Scheduler& s) { return s.host.state().command; })
      .def_prop_ro("drained",
                   [](const Scheduler& s) {
                     const State& state = s.host.state();
                     return refuses_new(state) && state.running.count + state.waiting.count == 0;
                   })
      .def_prop_ro("free_pages", [](const Scheduler& s) { return available_pages(s.host.state()); })
      .def_prop_ro("idle_pages", [](const Scheduler& s) { return s.host.state().idle.count; })
      .def_prop_ro("free_lines", [](const Scheduler& s) { return s.host.state().free_line_count; })
      .def_prop_ro("held_arena_lines", [](const Scheduler& s) { return audit(s.host.state()).held_arena_lines; })
      .def_prop_ro("promised_log_entries",
                   [](const Scheduler& s) { return audit(s.host.state()).promised_log_entries; })
      .def("page_owners", &Scheduler::page_owners)
      .def("cached_prefixes", &Scheduler::cached_prefixes)
      .def_prop_ro("prefix_searches", [](const Scheduler& s) { return s.host.state().prefixes.searches; })
      .def(
          "set_prefix_key_mask", [](Scheduler& s, u64 mask) { s.host.state().prefixes.key_mask = mask; }, "mask"_a)
      .def_prop_ro("memory", &Scheduler::memory)
      .def_prop_ro("call_ns", [](const Scheduler& s) { return s.host.call_ns(); });
}

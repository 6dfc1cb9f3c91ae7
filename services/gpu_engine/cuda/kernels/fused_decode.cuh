// A whole step of few decoding rows in one launch: norms, products, rotary embedding, attention, logits.
//
// A step of separate kernels leaves memory idle at every boundary: the last blocks end, the next kernel begins, its
// first copies travel. Here one block on each multiprocessor stays for the whole step and its weights are one stream
// (weight_stream.cuh); blocks wait for each other by counters, and for words by their marks (grid_progress.cuh). For
// steps in which every row is one token, at most kTokens of them.
//
// Each phase waits for the whole one before it, seven a layer: norm, QKV, attention, output, norm, gate-up with SwiGLU,
// down; then the last norm and the logits. Bits are those of the separate kernels. Bound by memory: 2 bytes a weight.
#pragma once

#include "attention_decode.cuh"
#include "rms_norm.cuh"
#include "rotary.cuh"
#include "weight_stream.cuh"

namespace blink {

enum Part : u32 { kQkv, kOutput, kGateUp, kDown, kParts, kHead = kParts };  // the products

// fused_decode.py has these in the same order.
struct FusedLayer {
  TensorMap weights[kParts];
  const bf16 *attention_norm, *feed_norm, *query_norm, *key_norm;  // the last two null where the model has none
  KvElement* pages;
  KvScales scales;
};

struct FusedModel {
  TensorMap inputs[kParts + 1], head;
  Product products[kParts + 1];
  const FusedLayer* layers;
  const bf16* last_norm;
  const float2* turns;  // [context, kHalf]
  u32* progress;        // [kParts layers + 1, 2]
  const u32* launch;    // its number
  u64* fused;           // marked pairs, [kTokens, kQkvWidth / 2]
  u64* delta;           // marked pairs, [kTokens, kHidden / 2]
  float* residual;      // [rows, kHidden]
  bf16 *normed, *attended, *activated, *last;
  float* logits;
  u32 layer_count;
  float eps, scale;
};

// Two bf16 with the mark of the product that they are of: whoever waits for them sees by each word whether it is there.
struct MarkedPairs {
  u64* words;
  u32 mark;

  __device__ void operator()(u64 pair, u32 outputs) const { store_marked(words + pair, outputs, mark); }
};

// Of a row, from `words` on.
struct MarkedRow {
  const u64* words;
  u32 mark;

  __device__ MarkedRow head(u32 index) const { return {words + index * (kHeadDim / 2), mark}; }
  __device__ uint4 operator()(u32 i) const { return await_marked(words + i / 2, mark); }
};

// A product with what comes before it; a step is a walk over all of them.
struct Turn {
  const FusedModel& model;
  u32 index = 0;

  __device__ u32 layer() const { return index / kParts; }
  __device__ bool is_head() const { return layer() == model.layer_count; }
  __device__ u32 part() const { return is_head() ? kHead : index % kParts; }
  __device__ bool valid() const { return index <= model.layer_count * kParts; }
  __device__ const Product& product() const { return model.products[part()]; }
  __device__ const FusedLayer& weights() const { return model.layers[layer()]; }
  __device__ const TensorMap& weight() const { return is_head() ? model.head : weights().weights[part()]; }
  __device__ u32* input() const { return model.progress + 2 * index; }  // reported by who makes the product's input
  __device__ u32* result() const { return input() + 1; }                // and by gate-up's blocks; others' have marks
};

// Warpgroups that attend: few rows have few splits.
inline constexpr u32 kAttenders = kTokens > 16 ? 2 : 1;

// They work in slots of the ring, which are lent to blocks that have splits, between the weights of QKV and output.
using Area = DecodeArea<2 * kPacked>;
inline constexpr u32 kAreasOfSlot = kSlotBytes / sizeof(Area);
inline constexpr u32 kAreaSlots = (kAttenders * kWarps + kAreasOfSlot - 1) / kAreasOfSlot;
static_assert(kAreasOfSlot > 0);

// What a split's queries become, and its row's newest key and value.
struct Rotated {
  alignas(16) Operand query[kGroup * kHeadDim];
  alignas(16) KvElement key[kHeadDim], value[kHeadDim];
};

// Smaller parts lie behind slots' areas, or in a slot more.
inline constexpr u32 kPartBytes = 4096, kSmallParts = 2 * kAttenders;
inline constexpr bool kPartsBehind =
    kSlotBytes - kAreasOfSlot * sizeof(Area) >= kPartBytes && kAreaSlots >= kSmallParts;
inline constexpr u32 kLentSlots = kAreaSlots + !kPartsBehind;
static_assert(sizeof(DecodeShared) <= kPartBytes && sizeof(Rotated) <= kPartBytes);

struct Lent {
  const WeightRing& ring;
  u32 first, attender;

  // Of one of the attender's warps.
  __device__ Area& area(u32 warp) const {
    const u32 index = attender * kWarps + warp;
    return reinterpret_cast<Area*>(slot(index / kAreasOfSlot))[index % kAreasOfSlot];
  }
  __device__ DecodeShared& shared() const { return *reinterpret_cast<DecodeShared*>(part(2 * attender)); }
  __device__ Rotated& rotated() const { return *reinterpret_cast<Rotated*>(part(2 * attender + 1)); }

 private:
  __device__ unsigned char* slot(u32 i) const {
    return ring.weights(first + i < ring.slots ? first + i : first + i - ring.slots);
  }
  __device__ unsigned char* part(u32 i) const {
    return kPartsBehind ? slot(i) + kAreasOfSlot * sizeof(Area) : slot(kAreaSlots) + i * kPartBytes;
  }
};

struct FusedShared {
  StreamBarriers barriers;
  u32 first_split[kTokens + 1];  // of each row, among all
};

inline constexpr u32 kSharedBytes = 226 << 10;  // of 227 KiB; a little is static
inline constexpr u32 kHeadBytes = (sizeof(FusedShared) + 1023) / 1024 * 1024;
inline constexpr u32 kSlots = (kSharedBytes - kHeadBytes) / kSlotBytes;
static_assert(kSlots > kLentSlots && kSlots >= kMostOnTheWay && kSlots <= kMostSlots);

inline constexpr u32 kFusedSharedBytes = kHeadBytes + kSlots * kSlotBytes;

inline constexpr u32 kConsumersMeet = 1;  // hardware barrier; warpgroup.cuh has the others

struct ConsumersMeet {
  __device__ void operator()() const { wait_at(kConsumersMeet, kConsumerThreads); }
};

__device__ inline bool attends(const Turn& turn, u32 splits) { return turn.part() == kOutput && blockIdx.x < splits; }

__device__ inline void stream_weights(const FusedModel& model, const WeightRing& ring, u32 splits) {
  WeightCursor at;
  for (Turn turn{model}; turn.valid(); ++turn.index) {
    const Turn next{model, turn.index + 1};
    if (next.valid()) prefetch_map(next.weight());
    if (attends(turn, splits)) ring.lend(kLentSlots, at);
    ring.copy_weights(turn.product(), turn.weight(), turn.part() == kGateUp, at);
  }
}

__device__ inline void stream_activations(const FusedModel& model, const WeightRing& ring, u32 rows, u32 splits,
                                          u32 samples) {
  Slot at;
  for (Turn turn{model}; turn.valid(); ++turn.index) {
    switch (turn.part()) {
      case kOutput:
        wait_for_phase(turn.input(), splits);
        break;
      case kDown:
        wait_for_phase(turn.input() - 1, model.products[kGateUp].blocks());
        break;  // gate-up's result
      case kHead:
        wait_for_phase(turn.input(), samples);
        break;
      default:
        wait_for_phase(turn.input(), rows);
    }
    if (attends(turn, splits)) at.skip(kLentSlots, ring.slots);
    fence_async_proxy_global();
    ring.copy_activations(turn.product(), model.inputs[turn.part()], at);
  }
}

// The block's first two warpgroups. A phase is waited for by one thread, whom the others meet at a barrier. They also
// meet after everything that uses slots: one that were a whole ring ahead would take what is in a slot for what will
// be there.
struct Consumers {
  const Step& step;
  const WorkList& work;
  const FusedModel& model;
  const u32* first_split;  // FusedShared's
  u32 rows, splits;        // splits of all rows and KV heads
  u32 first_mark;          // of the launch
  ConsumersMeet meet = {};

  __device__ void run(const WeightRing& ring) const {
    Slot at;
    for (Turn turn{model}; turn.valid(); ++turn.index) {
      make_input(turn, ring, at);
      const Product& product = turn.product();
      if (product.first_tile() == product.tiles) continue;
      const u32 part = turn.part();
      const Problem problem{part == kHead ? step.counts->samples : rows, product.outputs};
      ring.multiply(product, at, [&](const Sums& sums, u32 row) {
        switch (part) {
          case kGateUp:
            Swiglu{model.activated}.write(sums, problem, row);
            break;
          case kHead:
            Logits{model.logits}.write(sums, problem, row);
            break;
          case kQkv:
            Store<MarkedPairs>{{model.fused, mark(turn)}}.write(sums, problem, row);
            break;
          default:
            Store<MarkedPairs>{{model.delta, mark(turn)}}.write(sums, problem, row);
        }
      });
      if (part == kGateUp) {
        report(turn.result());
      } else {
        meet();
      }
    }
  }

 private:
  __device__ void make_input(const Turn& turn, const WeightRing& ring, Slot& at) const {
    switch (turn.part()) {
      case kQkv:
        norm_rows(turn, turn.weights().attention_norm);
        break;
      case kOutput:
        if (!attends(turn, splits)) break;
        attend(turn, ring, at);
        meet();
        break;
      case kGateUp:
        norm_rows(turn, turn.weights().feed_norm);
        break;
      case kHead:
        norm_samples(turn);
    }
  }

  // What this block's consumers wrote is done.
  __device__ void report(u32* phase) const {
    meet();
    if (threadIdx.x == 0) report_phase(phase);
  }

  __device__ u32 mark(const Turn& turn) const { return first_mark + turn.index; }

  // What the product before adds to a row of the residual stream.
  __device__ auto delta_of(const Turn& turn, u32 row) const {
    const MarkedRow delta{model.delta + row * (kHidden / 2), mark(turn) - 1};
    return [delta](u32 i) { return unpack(delta(i)); };
  }

  // A row is always the same block's, so its residual stream stays in one place.
  __device__ void norm_rows(const Turn& turn, const bf16* weight) const {
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
      float* residual = model.residual + row * kHidden;
      bf16* out = model.normed + row * kHidden;
      if (turn.index == 0) {
        normalize(residual, nullptr, Nothing{}, weight, out, model.eps, meet);
      } else {
        normalize(residual, residual, delta_of(turn, row), weight, out, model.eps, meet);
      }
      report(turn.input());
    }
  }

  __device__ void norm_samples(const Turn& turn) const {
    const u32 samples = step.counts->samples;
    const auto await = [&] {  // for the residual stream of the last layer's second norm, which gate-up comes after
      const Turn gate_up{model, turn.index - kParts + kGateUp};
      if (threadIdx.x == 0) wait_for_phase(gate_up.result(), model.products[kGateUp].blocks());
      meet();
    };
    for (u32 sample = blockIdx.x; sample < samples; sample += gridDim.x) {
      const u32 row = step.sample_row[sample];
      normalize(model.residual + row * kHidden, nullptr, delta_of(turn, row), model.last_norm,
                model.last + sample * kHidden, model.eps, meet, await);
      report(turn.input());
    }
  }

  // By each warpgroup alone.
  __device__ void attend(const Turn& turn, const WeightRing& ring, Slot& at) const {
    const Slot slots = at;
    at.skip(kLentSlots, ring.slots);
    const u32 warpgroup = threadIdx.x / kWarpgroup;
    if (warpgroup >= kAttenders) return;
    ring.borrow(kLentSlots, slots);
    const Lent lent{ring, slots.stage, warpgroup};
    const FusedLayer& layer = turn.weights();
    const AttentionScales scales(model.scale, layer.scales);
    const auto area_of = [&](u32 warp) -> Area& { return lent.area(warp); };
    for (u32 i = warpgroup * gridDim.x + blockIdx.x; i < splits; i += kAttenders * gridDim.x) {
      const WorkItem item = split_of(i / kKvHeads);
      const u32 kv_head = i % kKvHeads;
      const bool last = item.first + split_keys(item.kv_length) >= item.kv_length;
      const Rotated& rotated = lent.rotated();
      const auto make = [&] {
        rotate(lent.rotated(), layer, item, kv_head, last, mark(turn) - 1);
        synchronize_warpgroup();
        if (last) store_newest(rotated, layer, item, kv_head);
      };
      const Newest<decltype(make)> newest{make, last ? rotated.key : nullptr, rotated.value};
      decode_split(area_of, lent.shared(), step, work, item, kv_head, rotated.query, layer.pages, model.attended,
                   scales, newest);
      synchronize_warpgroup();
      if (thread_in_group() == 0) report_phase(turn.input());
    }
    ring.give_back(kLentSlots, slots, kConsumerThreads / (kAttenders * kWarpgroup));
  }

  __device__ WorkItem split_of(u32 index) const {
    u32 row = 0;
    while (first_split[row + 1] <= index) ++row;
    const u32 length = step.kv_length[row], first = first_split[row], split = index - first;
    return {row, static_cast<u32>(step.sequence[row]), row, 1, length, split * split_keys(length), first, split};
  }

  // The split's queries; the row's newest key and value too, if this is its last split.
  __device__ void rotate(Rotated& rotated, const FusedLayer& layer, const WorkItem& item, u32 kv_head, bool last,
                         u32 qkv) const {
    const MarkedRow fused{model.fused + item.token * (kQkvWidth / 2), qkv};
    const float2* turns = model.turns + static_cast<u64>(item.kv_length - 1) * kHalf;
    const u32 job = threadIdx.x % kJobs;
    for (u32 head = thread_in_group() / kJobs; head < kGroup + (last ? 2 : 0); head += kWarpgroup / kJobs) {
      if (head < kGroup) {
        const MarkedRow source = fused.head(kv_head * kGroup + head);
        rotate_head(source, rotated.query + head * kHeadDim, job, layer.query_norm, turns, model.eps);
      } else if (head == kGroup) {
        const MarkedRow source = fused.head(kHeads + kv_head);
        rotate_head(source, rotated.key, job, layer.key_norm, turns, model.eps, layer.scales.key);
      } else {
        copy_head(fused.head(kHeads + kKvHeads + kv_head), rotated.value, job, layer.scales.value);
      }
    }
  }

  // Into their page, for the steps to come.
  __device__ void store_newest(const Rotated& rotated, const FusedLayer& layer, const WorkItem& item,
                               u32 kv_head) const {
    const u32 position = item.kv_length - 1, i = thread_in_group();
    if (i >= 2 * kKeyPieces) return;
    const i32* line = step.page_table + static_cast<u64>(item.line) * step.pages_per_sequence;
    KvElement* key = layer.pages + page_offset(line[position / kPageSize], kv_head) + position % kPageSize * kHeadDim;
    const bool is_key = i < kKeyPieces;
    const uint4* source = reinterpret_cast<const uint4*>(is_key ? rotated.key : rotated.value);
    reinterpret_cast<uint4*>(is_key ? key : key + kPageValues)[i % kKeyPieces] = source[i % kKeyPieces];
  }
};

// By all threads of a launch's blocks; `memory` has kFusedSharedBytes at a multiple of 1,024.
__device__ inline void fused_step(unsigned char* memory, const Step& step, const WorkList& work,
                                  const FusedModel& model) {
  FusedShared& shared = *reinterpret_cast<FusedShared*>(memory);
  const WeightRing ring{shared.barriers, memory + kHeadBytes, kSlots};
  const u32 rows = step.counts->rows, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  if (rows == 0) return;
  if (threadIdx.x == 0) {
    ring.init();
    shared.first_split[0] = 0;
    for (u32 row = 0; row < rows; ++row) {
      shared.first_split[row + 1] = shared.first_split[row] + split_count(step.kv_length[row]);
    }
  }
  __syncthreads();
  const u32 splits = shared.first_split[rows] * kKvHeads;
  if (warp < kConsumerThreads / 32) {
    grab_registers<kConsumerRegisters>();
    const u32 first_mark = *model.launch * (kParts * model.layer_count + 1);
    Consumers{step, work, model, shared.first_split, rows, splits, first_mark}.run(ring);
    return;
  }
  yield_registers<kFillerRegisters>();
  if (threadIdx.x % 32 != 0) return;
  if (warp == kWeightWarp) stream_weights(model, ring, splits);
  if (warp == kActivationWarp) stream_activations(model, ring, rows, splits, step.counts->samples);
}

}  // namespace blink

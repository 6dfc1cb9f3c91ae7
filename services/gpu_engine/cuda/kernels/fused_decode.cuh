// A whole step of few decoding rows in one launch: norms, products, rotary embedding, attention, logits.
//
// A step of separate kernels leaves memory idle at every boundary: the last blocks end, the next kernel begins, its
// first copies travel. Here one block on each multiprocessor stays for the whole step and its weights are one stream
// (weight_stream.cuh); blocks wait for each other by counters (grid_progress.cuh). For steps in which every row is one
// token, at most kTokens of them.
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
  float* residual;      // [rows, kHidden]
  bf16 *normed, *fused, *attended, *delta, *activated, *last;
  float* logits;
  u32 layer_count;
  float eps, scale;
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
  __device__ u32* result() const { return input() + 1; }                // and by the product's blocks
};

// Warpgroups that attend, and how deep their rings are, of as many bytes in FP8 as in bf16: few rows have few splits.
inline constexpr u32 kAttenders = kTokens > 16 ? 2 : 1, kDecodeStages = 2 * kPacked / kAttenders;

// They work in slots of the ring, which are lent to blocks that have splits, between the weights of QKV and output.
using Area = DecodeArea<kDecodeStages>;
inline constexpr u32 kAreasOfSlot = kSlotWeightBytes / sizeof(Area);
inline constexpr u32 kAreaSlots = kAttenders * kWarps / kAreasOfSlot;
inline constexpr u32 kLentSlots = kAreaSlots > 2 * kAttenders ? kAreaSlots : 2 * kAttenders;
static_assert(kAreasOfSlot > 0 && sizeof(DecodeShared) <= kMostBoxes * kTokenBytes);

struct Lent {
  const WeightRing& ring;
  u32 first, attender;

  // Of one of the attender's warps.
  __device__ Area& area(u32 warp) const {
    const u32 index = attender * kWarps + warp;
    return reinterpret_cast<Area*>(ring.weights(slot(index / kAreasOfSlot)))[index % kAreasOfSlot];
  }
  __device__ DecodeShared& shared() const { return *reinterpret_cast<DecodeShared*>(ring.activations(slot(attender))); }
  __device__ Operand* query() const {  // [kGroup, kHeadDim]
    return reinterpret_cast<Operand*>(ring.activations(slot(kAttenders + attender)));
  }

 private:
  __device__ u32 slot(u32 i) const { return first + i < ring.slots ? first + i : first + i - ring.slots; }
};
static_assert(2 * kGroup * kHeadDim <= kMostBoxes * kTokenBytes);

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

// The block's first two warpgroups. A phase is waited for by one thread, whom the others meet at a barrier.
struct Consumers {
  const Step& step;
  const WorkList& work;
  const FusedModel& model;
  const u32* first_split;  // FusedShared's
  u32 rows, splits;        // splits of all rows and KV heads
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
          default:
            Store{part == kQkv ? model.fused : model.delta}.write(sums, problem, row);
        }
      });
      report(turn.result());
    }
  }

 private:
  __device__ void make_input(const Turn& turn, const WeightRing& ring, Slot& at) const {
    switch (turn.part()) {
      case kQkv:
        norm_rows(turn, turn.weights().attention_norm);
        break;
      case kOutput:
        if (attends(turn, splits)) attend(turn, ring, at);
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

  // Until the product before has left what is to be added to the residual stream, in all but the first norm.
  __device__ void wait_for_delta(const Turn& turn) const {
    if (turn.index == 0) return;
    const u32 before = turn.index % kParts == kQkv ? kDown : kOutput;
    if (threadIdx.x == 0) wait_for_phase(turn.result() - 2, model.products[before].blocks());
    meet();
  }

  // A row is always the same block's, so its residual stream stays in one place.
  __device__ void norm_rows(const Turn& turn, const bf16* weight) const {
    const auto await = [&] { wait_for_delta(turn); };
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
      const u32 at = row * kHidden;
      if (turn.index == 0) {
        normalize<false>(model.residual + at, Nothing{}, weight, model.normed + at, model.eps, meet, await);
      } else {
        const Loaded delta{model.delta + at};
        normalize<true>(model.residual + at, delta, weight, model.normed + at, model.eps, meet, await);
      }
      report(turn.input());
    }
  }

  __device__ void norm_samples(const Turn& turn) const {
    const u32 samples = step.counts->samples;
    const auto await = [&] { wait_for_delta(turn); };
    for (u32 sample = blockIdx.x; sample < samples; sample += gridDim.x) {
      const u32 from = step.sample_row[sample] * kHidden, to = sample * kHidden;
      const Loaded delta{model.delta + from};
      normalize<false>(model.residual + from, delta, model.last_norm, model.last + to, model.eps, meet, await);
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
    if (thread_in_group() == 0) wait_for_phase(turn.result() - 2, model.products[kQkv].blocks());
    synchronize_warpgroup();
    const FusedLayer& layer = turn.weights();
    const AttentionScales scales(model.scale, layer.scales);
    const auto area_of = [&](u32 warp) -> Area& { return lent.area(warp); };
    for (u32 i = warpgroup * gridDim.x + blockIdx.x; i < splits; i += kAttenders * gridDim.x) {
      const WorkItem item = split_of(i / kKvHeads);
      const u32 kv_head = i % kKvHeads;
      rotate(lent.query(), layer, item, kv_head);
      synchronize_warpgroup();
      decode_split(area_of, lent.shared(), step, work, item, kv_head, lent.query(), layer.pages, model.attended,
                   scales);
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

  // The split's queries into shared memory; the token's key and value, which its last split reads, into their page.
  __device__ void rotate(Operand* query, const FusedLayer& layer, const WorkItem& item, u32 kv_head) const {
    const u32 position = item.kv_length - 1;
    const bool last = item.first + split_keys(item.kv_length) > position;
    const bf16* fused = model.fused + item.token * kQkvWidth;
    const float2* turns = model.turns + static_cast<u64>(position) * kHalf;
    const u32 job = threadIdx.x % kJobs;
    for (u32 head = thread_in_group() / kJobs; head < kGroup + (last ? 2 : 0); head += kWarpgroup / kJobs) {
      if (head < kGroup) {
        const bf16* source = fused + (kv_head * kGroup + head) * kHeadDim;
        rotate_head(source, query + head * kHeadDim, job, layer.query_norm, turns, model.eps);
        continue;
      }
      const i32* line = step.page_table + static_cast<u64>(item.line) * step.pages_per_sequence;
      KvElement* key = layer.pages + page_offset(line[position / kPageSize], kv_head) + position % kPageSize * kHeadDim;
      const bf16* source = fused + (kHeads + kv_head) * kHeadDim;
      if (head == kGroup) {
        rotate_head(source, key, job, layer.key_norm, turns, model.eps, layer.scales.key);
      } else {
        copy_head(source + kKvHeads * kHeadDim, key + kPageValues, job, layer.scales.value);
      }
    }
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
    Consumers{step, work, model, shared.first_split, rows, splits}.run(ring);
    return;
  }
  yield_registers<kFillerRegisters>();
  if (threadIdx.x % 32 != 0) return;
  if (warp == kWeightWarp) stream_weights(model, ring, splits);
  if (warp == kActivationWarp) stream_activations(model, ring, rows, splits, step.counts->samples);
}

}  // namespace blink

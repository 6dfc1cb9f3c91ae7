// The weights of a whole step as one stream through a ring in shared memory (fused_decode.cu).
//
// Two threads of a block fill the ring, product after product in the same order: one copies weights, which no kernel
// writes, as far ahead as the ring has room; the other adds the activations as soon as all blocks have reported the
// phase that makes them. So memory goes on delivering while blocks wait for each other.
//
// A product's arithmetic is that of skinny_gemm.cuh, bit for bit: k in order, one accumulator an output.
#pragma once

#include "grid_progress.cuh"
#include "skinny_endings.cuh"
#include "skinny_gemm.cuh"
#include "warpgroup.cuh"

namespace blink {

inline constexpr u32 kSlotWeightBytes = 16384;
inline constexpr u32 kMostBoxes = 4;  // of a stage
inline constexpr u32 kSlotBytes = kSlotWeightBytes + kMostBoxes * kTokenBytes;
inline constexpr u32 kMostSlots = 12;

// Stages of weights that a block has asked for. So many keep memory busy; whatever else it waits for, such as what
// other blocks have reported, queues behind them.
inline constexpr u32 kMostOnTheWay = kTokens > 8 ? 4 : 3;

// Two warpgroups consume; of the third, two threads fill the ring, and its registers are the consumers'.
inline constexpr u32 kConsumerThreads = 256;
inline constexpr u32 kWeightWarp = 8, kActivationWarp = 9;
inline constexpr u32 kFusedThreads = 384;
inline constexpr u32 kFillerRegisters = 40, kConsumerRegisters = 232;

// How a product is shared out; fused_plan.py has the same. A stage is `boxes` boxes of 64 columns.
struct Product {
  u32 outputs;  // of Y
  u32 rows;     // of the weight in a tile, a multiple of 16
  u32 tiles;    // in all
  u32 run;      // successive tiles of a block
  u32 boxes;    // of a stage; rows x boxes is at most 128
  u32 stages;   // of a tile

  __device__ u32 blocks() const { return (tiles + run - 1) / run; }  // that have tiles
  __device__ u32 first_tile() const { return min(blockIdx.x * run, tiles); }
  __device__ u32 end_tile() const { return min(blockIdx.x * run + run, tiles); }
  __device__ u32 box_bytes() const { return rows * kRowBytes; }
};

// The same value in all lanes, which ptxas then knows.
__device__ inline u32 uniform(u32 value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

struct StreamBarriers {
  CopyBarrier weights[kMostSlots], activations[kMostSlots];  // are there
  CopyBarrier empty[kMostSlots];
};

// Where the thread that copies weights is, and the oldest of its copies that it has not seen arrive.
struct WeightCursor {
  Slot next, oldest;
  u32 on_the_way = 0;
};

// Products of fewer rows than 64 a tile read on behind a box: into the next one, or the slot's activations.
struct WeightRing {
  StreamBarriers& barriers;
  unsigned char* memory;  // of the slots, at a multiple of 1,024
  u32 slots;

  __device__ unsigned char* weights(u32 slot) const { return memory + slot * kSlotBytes; }
  __device__ unsigned char* activations(u32 slot) const { return weights(slot) + kSlotWeightBytes; }

  __device__ void init() const {
    for (u32 i = 0; i < slots; ++i) {
      barriers.weights[i].init(1);
      barriers.activations[i].init(1);
      barriers.empty[i].init(kConsumerThreads / 32);
    }
    fence_barrier_init();
  }

  // `gated`: the weight is gate over up, whose rows alternate by eight (skinny_gemm.cuh).
  __device__ void copy_weights(const Product& product, const TensorMap& weight, bool gated, WeightCursor& at) const {
    for_each_stage(product, [&](u32 tile, u32 chunk) {
      CopyBarrier& there = begin_stage(at);
      there.arrive_expecting(product.boxes * product.box_bytes());
      if (gated) {
        copy_once(weights(at.next.stage), weight, there, 0, 0, 0, tile * product.rows / 16, chunk);
      } else {
        copy_once(weights(at.next.stage), weight, there, 0, tile * product.rows, chunk);
      }
      at.next.advance(slots);
    });
  }

  __device__ void copy_activations(const Product& product, const TensorMap& x, Slot& at) const {
    for_each_stage(product, [&](u32, u32 chunk) {
      wait_until_empty(at);
      CopyBarrier& there = barriers.activations[at.stage];
      there.arrive_expecting(product.boxes * kTokenBytes);
      copy_box(activations(at.stage), x, there, 0, 0, chunk);
      at.advance(slots);
    });
  }

  // The next slots, for something else than a product: by the thread that copies weights.
  __device__ void lend(u32 count, WeightCursor& at) const {
    for (u32 i = 0; i < count; ++i, at.next.advance(slots)) {
      begin_stage(at).arrive();
      barriers.activations[at.next.stage].arrive();
    }
  }

  // By consumers: returns once the slots are theirs.
  __device__ void borrow(u32 count, Slot at) const {
    for (u32 i = 0; i < count; ++i, at.advance(slots)) wait_until_full(at);
  }

  // By all threads of each warp that borrowed; `arrivals` is the warps there are for each that did.
  __device__ void give_back(u32 count, Slot at, u32 arrivals) const {
    fence_async_proxy();
    __syncwarp();
    for (u32 i = 0; i < count; ++i, at.advance(slots)) give_back(at.stage, arrivals);
  }

  // By the consumers' two warpgroups, 64 rows of a tile each: calls end(sums, first of the warp's 16 rows). The second
  // one passes over tiles of 64 rows or less, by a loop of no rounds: ptxas runs products one by one if a branch
  // decides about them. Its help would be the same sums once more.
  template <class End>
  __device__ void multiply(const Product& product, Slot& at, const End& end) const {
    const bool both = product.rows > kGroupRows;
    const u32 group = threadIdx.x / kWarpgroup, row = threadIdx.x / 32 * 16;
    const u32 first_tile = uniform(product.first_tile());
    const u32 end_tile = uniform(both || group == 0 ? product.end_tile() : first_tile);
    const Chain chain{uniform(product.stages), uniform(product.box_bytes()), uniform(group * kGroupRows * kRowBytes),
                      both ? 1u : 2u};
    if (end_tile == first_tile) at.skip((product.end_tile() - first_tile) * chain.stages, slots);
    for (u32 tile = first_tile; tile < end_tile; ++tile) {
      Sums sums = {};
      switch (product.boxes) {
        case 1:
          add_products<1>(chain, at, sums);
          break;
        case 2:
          add_products<2>(chain, at, sums);
          break;
        default:
          add_products<4>(chain, at, sums);
      }
      if (row < product.rows) end(sums, tile * product.rows + row);
    }
  }

 private:
  // What a warpgroup adds up for a tile.
  struct Chain {
    u32 stages, box_bytes;
    u32 offset;    // of the warpgroup's rows in a box
    u32 arrivals;  // that each of its warps gives a slot back with
  };

  // One stage's products run while the next one's are waited for and issued. That needs their number when this is
  // compiled: of a loop whose rounds it doesn't know, ptxas ends the group by an empty product, and waiting for all but
  // the last group is then waiting for all that count.
  template <u32 kBoxes>
  __device__ void add_products(const Chain& chain, Slot& at, Sums& sums) const {
    u32 before = 0;
    for (u32 stage = 0; stage < chain.stages; ++stage, at.advance(slots)) {
      wait_until_full(at);
      const u64 wide = operand(shared_address(weights(at.stage)) + chain.offset, 1024);
      const u64 narrow = operand(shared_address(activations(at.stage)), 1024);
      begin_products();
#pragma unroll
      for (u32 box = 0; box < kBoxes; ++box) {
#pragma unroll
        for (u32 k = 0; k < kDepth / 16; ++k) {
          multiply_narrow(sums, wide + box * (chain.box_bytes / 16) + 2 * k, narrow + box * (kTokenBytes / 16) + 2 * k);
        }
      }
      commit_products();
      wait_products<1>();
      if (stage > 0) give_back(before, chain.arrivals);
      before = at.stage;
    }
    wait_products<0>(sums);
    give_back(before, chain.arrivals);
  }

  __device__ void wait_until_empty(const Slot& at) const { barriers.empty[at.stage].wait(at.parity ^ 1); }

  __device__ void wait_until_full(const Slot& at) const {
    barriers.weights[at.stage].wait(at.parity);
    barriers.activations[at.stage].wait(at.parity);
  }

  // Calls visit(tile, first box of k) for every stage that is this block's.
  template <class Visit>
  __device__ static void for_each_stage(const Product& product, const Visit& visit) {
    for (u32 tile = product.first_tile(); tile < product.end_tile(); ++tile) {
      for (u32 stage = 0; stage < product.stages; ++stage) visit(tile, stage * product.boxes);
    }
  }

  // Waits until the next slot is empty and few enough copies are on their way. Returns the barrier of its weights.
  __device__ CopyBarrier& begin_stage(WeightCursor& at) const {
    wait_until_empty(at.next);
    if (at.on_the_way == kMostOnTheWay) {
      barriers.weights[at.oldest.stage].wait(at.oldest.parity);
      at.oldest.advance(slots);
    } else {
      ++at.on_the_way;
    }
    return barriers.weights[at.next.stage];
  }

  __device__ void give_back(u32 slot, u32 arrivals) const {
    if (threadIdx.x % 32 == 0) barriers.empty[slot].arrive(arrivals);
  }
};

}  // namespace blink

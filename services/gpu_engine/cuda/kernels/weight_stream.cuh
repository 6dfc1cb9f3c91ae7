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
  CopyBarrier full[kMostSlots], empty[kMostSlots];
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
      barriers.full[i].init(1);
      barriers.empty[i].init(kConsumerThreads / 32);
    }
    fence_barrier_init();
  }

  // Calls visit(slot, tile, first box of k) for every stage that is this block's, each once its slot is free.
  template <class Visit>
  __device__ void for_each_stage(const Product& product, Slot& at, const Visit& visit) const {
    for (u32 tile = product.first_tile(); tile < product.end_tile(); ++tile) {
      for (u32 stage = 0; stage < product.stages; ++stage, at.advance(slots)) {
        barriers.empty[at.stage].wait(at.parity ^ 1);
        visit(at.stage, tile, stage * product.boxes);
      }
    }
  }

  // `gated`: the weight is gate over up, whose rows alternate by eight (skinny_gemm.cuh).
  __device__ void copy_weights(const Product& product, const TensorMap& weight, bool gated, Slot& at) const {
    for_each_stage(product, at, [&](u32 slot, u32 tile, u32 chunk) {
      CopyBarrier& full = barriers.full[slot];
      full.arrive_expecting(product.boxes * (product.box_bytes() + kTokenBytes));
      for (u32 box = 0; box < product.boxes; ++box) {
        const Cursor cursor{tile * product.rows, chunk + box};
        unsigned char* target = weights(slot) + box * product.box_bytes();
        gated ? Gated::copy(target, weight, full, cursor) : Plain::copy(target, weight, full, cursor);
      }
    });
  }

  __device__ void copy_activations(const Product& product, const TensorMap& x, Slot& at) const {
    for_each_stage(product, at, [&](u32 slot, u32, u32 chunk) {
      for (u32 box = 0; box < product.boxes; ++box) {
        copy_box(activations(slot) + box * kTokenBytes, x, barriers.full[slot], (chunk + box) * kBoxColumns, 0);
      }
    });
  }

  // By the consumers' two warpgroups, 64 rows of a tile each: calls end(sums, first of the warp's 16 rows). The second
  // one passes over tiles of 64 rows or less, by a loop of no rounds: ptxas runs products one by one if a branch
  // decides about them. Its help would be the same sums once more.
  template <class End>
  __device__ void multiply(const Product& product, Slot& at, const End& end) const {
    const bool both = product.rows > kGroupRows;
    const u32 group = threadIdx.x / kWarpgroup, row = threadIdx.x / 32 * 16, arrivals = both ? 1 : 2;
    const u32 offset = uniform(group * kGroupRows * kRowBytes), stages = uniform(product.stages);
    const u32 boxes = uniform(product.boxes), first_tile = uniform(product.first_tile());
    const u32 end_tile = uniform(both || group == 0 ? product.end_tile() : first_tile);
    if (end_tile == first_tile) at.skip((product.end_tile() - first_tile) * stages, slots);
    for (u32 tile = first_tile; tile < end_tile; ++tile) {
      Sums sums = {};
      u32 before = 0;
      for (u32 stage = 0; stage < stages; ++stage, at.advance(slots)) {
        barriers.full[at.stage].wait(at.parity);
        u64 wide = operand(shared_address(weights(at.stage)) + offset, 1024);
        u64 narrow = operand(shared_address(activations(at.stage)), 1024);
        begin_products();
        for (u32 box = 0; box < boxes; ++box) {
#pragma unroll
          for (u32 k = 0; k < kDepth / 16; ++k) multiply_narrow(sums, wide + 2 * k, narrow + 2 * k);
          wide += product.box_bytes() / 16;
          narrow += kTokenBytes / 16;
        }
        commit_products();
        wait_products<1>();
        if (stage > 0) give_back(before, arrivals);
        before = at.stage;
      }
      wait_products<0>(sums);
      give_back(before, arrivals);
      if (row < product.rows) end(sums, tile * product.rows + row);
    }
  }

 private:
  __device__ void give_back(u32 slot, u32 arrivals) const {
    if (threadIdx.x % 32 == 0) barriers.empty[slot].arrive(arrivals);
  }
};

}  // namespace blink

// Defines the kernel table of the instruction set that this translation unit is compiled for.
// Include once, after defining BLINK_ISA.
#pragma once

#include "services/gpu_engine/cpu/attention.hpp"
#include "services/gpu_engine/cpu/elementwise.hpp"
#include "services/gpu_engine/cpu/linear.hpp"
#include "services/gpu_engine/cpu/race.hpp"

namespace blink::cpu::BLINK_ISA {

#define BLINK_TEXT_OF(name) #name
#define BLINK_TEXT(name) BLINK_TEXT_OF(name)

extern const KernelTable table;
const KernelTable table = {BLINK_TEXT(BLINK_ISA),
                           kTallestTile,
                           tile_height,
                           pack_activations,
                           multiply_panels,
                           expand_panels,
                           rms_norm,
                           swiglu,
                           rotate,
                           attend,
                           largest,
                           weigh_logits,
                           race};

}  // namespace blink::cpu::BLINK_ISA

#define BLINK_ISA baseline
#include "services/gpu_engine/cpu/isa.hpp"

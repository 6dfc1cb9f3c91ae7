#define BLINK_ISA avx2
#include "services/gpu_engine/cpu/isa.hpp"

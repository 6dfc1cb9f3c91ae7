#define BLINK_ISA avx512
#include "services/gpu_engine/cpu/isa.hpp"

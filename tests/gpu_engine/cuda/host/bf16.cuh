// The real file, with its one instruction in C++.
#pragma once

#include "device.hpp"

#define asm(...) pair = pack_pair(low, high)
#include "services/gpu_engine/cuda/kernels/bf16.cuh"
#undef asm

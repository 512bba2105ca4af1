// Every 64-bit Arm processor has these instructions, so no compiler flag and no question to the processor is needed.
#include <math.h>
#include <string.h>

#include <type_traits>

#include "problem.h"

#ifdef __aarch64__
#ifndef __clang__  // gcc would move all loads of a step before its products, for which there are not enough registers
#pragma GCC optimize("no-schedule-insns")
#endif
#define ISA neon
#define LANES 4
#define ROW_VECTORS 3
#define STEP 8
#define CPU_HAS_ISA true
#include "kernel.h"

constexpr clearhead::Kernels clearhead::neon_kernels = clearhead::neon::table("neon");
#endif

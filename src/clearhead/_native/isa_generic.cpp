// Four lanes, which every 64-bit processor has: SSE2 on x86, NEON on Arm.
#include "problem.h"

#define ISA generic
#define LANES 4
#define ROW_VECTORS 3
#define STEP 4
#define CPU_HAS_ISA true
#include "kernel.h"

constexpr clearhead::Kernels clearhead::generic_kernels = clearhead::generic::table("generic");

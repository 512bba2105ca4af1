#include <math.h>
#include <string.h>

#include <type_traits>

#include "problem.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c")
#define ISA avx2
#define LANES 8
#define ROW_VECTORS 3
#define STEP 4
#define CPU_HAS_ISA \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
#include "kernel.h"

const clearhead::Kernels clearhead::avx2_kernels = clearhead::avx2::table("avx2");
#endif

#include "problem.h"

#if defined(__x86_64__)
#ifdef __clang__  // does not support this name, but every processor with AVX2 has F16C
#define CPU_HAS_F16C true
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#define CPU_HAS_F16C __builtin_cpu_supports("f16c")
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA avx2
#define LANES 8
#define ROW_VECTORS 3
#define STEP 4
#define CPU_HAS_ISA (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && CPU_HAS_F16C)
#include "kernel.h"

constexpr clearhead::Kernels clearhead::avx2_kernels = clearhead::avx2::table("avx2");
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

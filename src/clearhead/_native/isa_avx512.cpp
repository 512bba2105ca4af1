#include "problem.h"

#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define ISA avx512
#define LANES 16
#define ROW_VECTORS 3
#define STEP 8
#define CPU_HAS_ISA                                                            \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && \
     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
#include "kernel.h"

constexpr clearhead::Kernels clearhead::avx512_kernels = clearhead::avx512::table("avx512");
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

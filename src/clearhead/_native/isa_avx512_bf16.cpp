#include "problem.h"

#ifdef COMPILES_PAIRS
// Before the pragma, so that it runs on every processor.
static bool supported() { return clearhead::avx512_kernels.supported() && __builtin_cpu_supports("avx512bf16"); }

#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#define ISA avx512_bf16
#define LANES 16
#define ROW_VECTORS 3
#define STEP 8
#define HAS_PAIRS
#include "backward_pairs.h"

constexpr clearhead::Kernels clearhead::avx512_bf16_pairs = clearhead::avx512_bf16::table("avx512_bf16", supported);
#endif

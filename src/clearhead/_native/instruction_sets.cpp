#include "problem.h"

#ifdef COMPILES_PAIRS
#include <cpuid.h>
#endif

namespace clearhead {
namespace {

#ifdef COMPILES_PAIRS
Kernels with_pairs(const Kernels& pairs) {
    Kernels result = avx512_kernels;
    result.name = pairs.name, result.supported = pairs.supported, result.pairs = true;
    result.forward_scratch = pairs.forward_scratch, result.forward[bfloat16] = pairs.forward[bfloat16];
    result.backward_scratch = pairs.backward_scratch, result.backward[bfloat16] = pairs.backward[bfloat16];
    if (pairs.affine_columns[bfloat16]) result.affine_columns[bfloat16] = pairs.affine_columns[bfloat16];
    return result;
}

#ifdef COMPILES_AMX
const Kernels amx_kernels = with_pairs(amx_pairs);
#endif
const Kernels avx512_bf16_kernels = with_pairs(avx512_bf16_pairs);
#endif

}  // namespace

const Kernels* const INSTRUCTION_SETS[] = {
#ifdef COMPILES_AMX
    &amx_kernels,
#endif
#ifdef COMPILES_PAIRS
    &avx512_bf16_kernels,
#endif
#ifdef __x86_64__
    &avx512_kernels,      &avx2_kernels,
#endif
#ifdef __aarch64__
    &neon_kernels,
#endif
    &generic_kernels};
const int64_t INSTRUCTION_SET_COUNT = sizeof INSTRUCTION_SETS / sizeof *INSTRUCTION_SETS;

bool pairs_are_slow() {
#ifdef COMPILES_PAIRS
    constexpr unsigned TILES_OF_BFLOAT16 = 1u << 22;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES_OF_BFLOAT16);
#else
    return false;
#endif
}

}  // namespace clearhead

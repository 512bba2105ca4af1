#include "problem.h"

#ifdef COMPILES_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Whether the processor has tile registers, and Linux lets this process use them, which a process has to request.
bool ask_for_tiles() {
    constexpr unsigned TILES = 1u << 24, OF_BFLOAT16 = 1u << 22;
    constexpr int ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & TILES) || !(d & OF_BFLOAT16)) return false;
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}

bool may_use_tiles() {
    static const bool answer = ask_for_tiles();  // asking takes longer than a small attention
    return answer;
}

// Before the pragma, so that it runs on every processor.
bool supported() {
    return clearhead::avx512_kernels.supported() && __builtin_cpu_supports("avx512bf16") && may_use_tiles();
}

}  // namespace

#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#define ISA amx
#define LANES 16
#define ROW_VECTORS 3
#define STEP 8
#define HAS_AMX
#include "backward_pairs.h"

constexpr clearhead::Kernels clearhead::amx_pairs = clearhead::amx::table("amx", supported);
#endif

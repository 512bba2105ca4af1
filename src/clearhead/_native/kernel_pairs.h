// Forward and backward pass of bfloat16 for instruction sets that multiply pairs of it; everything else is that of AVX-512.
// The source that includes this defines what isa.h lists, and HAS_AMX if there are tile registers.
#pragma once
#include "backward_pairs.h"

namespace clearhead::ISA {

static int64_t scratch_of_forward(const Problem& p, int64_t task_rows) {
    if (p.type != Type::bfloat16) return avx512_kernels.forward_scratch(p, task_rows);
    return forward_scratch<BFloat16>(p, task_rows);
}

static void forward(const Problem& p, const Task& task, float* scratch) {
    if (p.type != Type::bfloat16) return avx512_kernels.forward(p, task, scratch);
    forward_typed<BFloat16>(p, task, scratch);
}

static int64_t scratch_of_backward(const Problem& p, int64_t task_rows) {
    if (p.type != Type::bfloat16 || p.few) return avx512_kernels.backward_scratch(p, task_rows);
    return backward_scratch_of_pairs(p, task_rows);
}

static void backward(const Problem& p, const Task& task, float* sums, float* scratch) {
    if (p.type != Type::bfloat16 || p.few) return avx512_kernels.backward(p, task, sums, scratch);
    backward_typed<BFloat16>(p, task, sums, scratch);
}

constexpr PairKernels table(const char* name, bool (*supported)()) {
    return {name, supported, scratch_of_forward, forward, scratch_of_backward, backward};
}

}  // namespace clearhead::ISA

// The forward and backward pass of bfloat16 for instruction sets that multiply pairs. Everything else is AVX-512's.
// The including source defines the macros of vector.h, and HAS_AMX if there are tile registers.
#pragma once
#include "backward_pairs.h"

namespace clearhead::ISA {

constexpr InstructionSet table(const char* name, bool (*supported)()) {
    Kernels pairs = {};
    pairs.forward_scratch = forward_scratch<BFloat16>, pairs.forward = forward<BFloat16>;
    pairs.backward_scratch = backward_scratch_of_pairs, pairs.backward = backward<BFloat16>;
    return {name, supported, {{}, pairs, {}}};
}

}  // namespace clearhead::ISA

// Forward and backward pass of bfloat16 for instruction sets that multiply pairs of it; everything else is that of AVX-512.
// The source that includes this defines what isa.h lists, and HAS_AMX if there are tile registers.
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

// All functions of one instruction set. The including source defines the macros of vector.h and CPU_HAS_ISA, an expression
// that is true on processors with it.
#pragma once
#include "backward.h"
#include "statistics.h"

namespace clearhead::ISA {

template <class T>
constexpr Kernels kernels_of() {
    return {TILE,           masks_size,   pack_masks,       forward_scratch<T>, forward<T>,
            decode_scratch, partial_size, decode<T>,        merge<T>,           backward_scratch,
            sums_size,      backward<T>,  write_sums<T>,    statistics_scratch, statistics<T>,
            nullptr};
}

static bool supported() { return CPU_HAS_ISA; }

constexpr InstructionSet table(const char* name) {
    return {name, supported, {kernels_of<float>(), kernels_of<BFloat16>(), kernels_of<Float16>()}};
}

}  // namespace clearhead::ISA

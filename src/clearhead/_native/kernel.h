// All functions of one instruction set. The including source defines what isa.h lists, and CPU_HAS_ISA, an expression that
// is true on processors with it.
#pragma once
#include "affine.h"
#include "backward.h"
#include "encoder.h"
#include "gathered_statistics.h"
#include "transposition.h"

namespace clearhead::ISA {

static bool supported() { return CPU_HAS_ISA; }

#define BY_TYPE(function) {function<float>, function<BFloat16>, function<Float16>}

// clang-format off
constexpr Kernels table(const char* name) {
    return {name, TILE, supported, masks_size, pack_masks,
            forward_scratch, BY_TYPE(forward),
            decode_scratch, partial_size, BY_TYPE(decode), BY_TYPE(merge),
            backward_scratch, sums_size, BY_TYPE(backward), BY_TYPE(write_sums),
            statistics_scratch, BY_TYPE(statistics),
            BY_TYPE(norm_rows), BY_TYPE(rotate_rows), BY_TYPE(affine_columns),
            gathered_rows, gathered_scratch, gathered_partial, BY_TYPE(gather), BY_TYPE(merge_gathered),
            gathered_back_scratch, BY_TYPE(gather_back),
            gathered_statistics_scratch, BY_TYPE(gather_statistics), false, multiply_matrices, transpose_columns};
}
// clang-format on

}  // namespace clearhead::ISA

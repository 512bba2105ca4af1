// Matrices written out transposed, as a product reads the gradients that make that of a weight.
#pragma once
#include "halves.h"

namespace clearhead::ISA {

// The columns from `start` on, up to `stop`.
[[maybe_unused]] static void transpose_columns(const Transposition& t, int64_t start, int64_t stop) {
    for (int64_t row = 0; row < t.rows; row += LANES)
        for (int64_t column = start; column < stop; column += LANES) {
            Floats square[LANES] = {};
            UNROLL for (int64_t r = 0; r < LANES; r++)
                if (row + r < t.rows) square[r] = load_some(t.from + (row + r) * t.columns + column, stop - column);
            transpose(square);
            UNROLL for (int64_t c = 0; c < LANES; c++)
                if (column + c < stop) store_some(t.to + (column + c) * t.stride + row, square[c], t.rows - row);
        }
}

}  // namespace clearhead::ISA

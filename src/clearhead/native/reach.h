// Who takes part at all in a call: the rows that see a key, and the keys that some row sees.
#pragma once
#include <stdint.h>

namespace clearhead {

// A tensor of marks or of numbers to add. Steps count cells and are zero where a size of 1 broadcasts.
struct Cells {
    const void* data;
    int64_t bytes;    // of a cell
    uint64_t hidden;  // the bits of a cell that hides
    int64_t batch, head, row, column;
};

constexpr int64_t MOST_MASKS = 4;

struct Sought {
    int64_t batch, heads, rows, keys;  // 1 batch item or head where all are alike
    int64_t low, high, stop;           // row i may see i + low <= j <= i + high and j < stop, where all masks show it
    uint8_t *queries, *seen;           // results, (batch, heads, rows) and (batch, heads, keys)
    int64_t count;
    Cells masks[MOST_MASKS];
};

// Whether some row sees nothing, and whether some key is seen by none.
struct LeftOut {
    bool queries, keys;
};

LeftOut find_reach(const Sought& sought);

}  // namespace clearhead

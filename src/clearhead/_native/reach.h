// Who takes part at all in a call: the rows that see a key, and the keys that some row sees.
#pragma once
#include "problem.h"

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

// Who is left out of a request whose masks are tensors and a band.
class Absent {
  public:
    explicit Absent(const Problem& problem);
    ~Absent();
    Absent(const Absent&) = delete;

    bool enough_memory() const { return memory_ != nullptr; }
    bool any() const { return left_out_.queries || left_out_.keys; }
    // Sets rows of those who are left out to zero, where all heads share the masks.
    void clear(const View& queries, const View& keys, const View& values) const;

  private:
    const Problem& problem_;
    Sought sought_ = {};
    LeftOut left_out_ = {false, false};
    uint8_t* memory_;
};

}  // namespace clearhead

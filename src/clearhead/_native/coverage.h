// Which rows see a key, and which keys some row sees; and problems in which what is hidden altogether holds no NaN.
#pragma once
#include "problem.h"

namespace clearhead {

// A tensor of bool or of a bias. Strides count cells and are zero where a size of 1 broadcasts.
struct Cells {
    const void* data;
    int64_t bytes;    // of a cell
    uint64_t hidden;  // the bits of a cell that hides
    int64_t batch, head, row, column;
};

constexpr int64_t MOST_MASKS = 4;

struct CoverageSearch {
    int64_t batch, heads, rows, keys;  // 1 batch item or head where all have the same mask
    int64_t low, high, stop;           // row i may see i + low <= j <= i + high and j < stop, where all masks show it
    const int32_t *first, *last;       // and first <= j < last of its own, or null
    int64_t span_batch, span_row;
    uint8_t *rows_seen, *keys_seen;  // results, (batch, heads, rows) and (batch, heads, keys)
    int64_t count;
    Cells masks[MOST_MASKS];
};

// Whether some row is fully masked, and whether some key is masked for every row.
struct FullyMasked {
    bool rows, keys;
};

FullyMasked find_coverage(const CoverageSearch& search);

// A problem with copies of operands in which fully masked rows, and keys and values that are masked for every row, are
// zero: their weights are zero, but zero times NaN is NaN.
class Isolated {
  public:
    explicit Isolated(const Problem& problem);
    ~Isolated();
    Isolated(const Isolated&) = delete;

    bool enough_memory() const { return enough_memory_; }
    bool any() const { return hidden_.rows || hidden_.keys; }
    const Problem& problem() const { return copy_; }
    // Sets the gradients of what is hidden to zero.
    void clear_gradients() const;

  private:
    bool row_seen(int64_t batch, int64_t head, int64_t row) const;
    bool key_seen(int64_t batch, int64_t kv_head, int64_t key) const;
    void* allocate(int64_t bytes);
    void copy_rows(View Problem::* view, int64_t columns);
    void copy_keys(View Problem::* view, int64_t columns);
    void copy_lse_gradient();

    static constexpr int MOST_COPIES = 7;

    const Problem& problem_;
    Problem copy_;
    CoverageSearch search_ = {};
    FullyMasked hidden_ = {false, false};
    bool enough_memory_ = true;
    void* memory_[MOST_COPIES] = {};
    int count_ = 0;
};

// Whether masks may hide a row or a key altogether, judged without reading tensors.
bool may_hide_altogether(const Problem& problem);

}  // namespace clearhead

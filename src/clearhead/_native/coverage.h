// Finds fully masked rows, and keys masked for every row. Makes copies of problems without NaN in them.
#pragma once
#include <memory>
#include <vector>

#include "problem.h"

namespace clearhead {

// A tensor of bool or of a bias. Strides count cells and are zero where a size of 1 broadcasts.
struct Cells : View {
    int64_t bytes;    // of a cell
    uint64_t hidden;  // the bits of a cell that hides
};

constexpr int64_t MOST_MASKS = 4;

// Row ranges and masks, each of which may hide keys.
struct CoverageSearch : RowRanges {
    int64_t batch, heads;            // 1 batch item or head where all have the same mask
    uint8_t *rows_seen, *keys_seen;  // results, (batch, heads, rows) and (batch, heads, keys)
    int64_t count;
    Cells masks[MOST_MASKS];
};

// Whether some row is fully masked, and whether some key is masked for every row.
struct FullyMasked {
    bool rows, keys;
};

FullyMasked find_coverage(const CoverageSearch& search);

// A problem with copies of operands. In the copies, fully masked rows are zero, and so are keys and values that are
// masked for every row. Their weights are zero, but zero times NaN is NaN. Throws std::bad_alloc without memory.
class Isolated {
  public:
    explicit Isolated(const Problem& problem);

    bool any() const { return hidden_.rows || hidden_.keys; }
    const Problem& problem() const { return copy_; }
    // Sets the gradients of these rows, keys and values to zero.
    void clear_gradients() const;

  private:
    enum class Axis { rows, keys };
    // Calls work(batch, head, row or key, whether it is visible) unless all are visible.
    template <class Work>
    void each(Axis axis, const Work& work) const;
    bool is_visible(Axis axis, int64_t batch, int64_t head, int64_t index) const;
    void copy_operand(View Problem::* view, Axis axis, int64_t columns);
    void clear(const View& view, Axis axis, int64_t columns) const;
    char* allocate(int64_t bytes);

    const Problem& problem_;
    Problem copy_;
    CoverageSearch search_ = {};
    FullyMasked hidden_ = {false, false};
    std::vector<std::unique_ptr<char[]>> memory_;
};

// Whether the mask may have fully masked rows or keys. Reads no tensors.
bool may_hide_altogether(const Problem& problem);

}  // namespace clearhead

#include "reach.h"

#include <stdlib.h>
#include <string.h>

namespace clearhead {
namespace {

constexpr int64_t CHUNK = 16;  // cells that are read before it is asked whether that was enough
constexpr int64_t AHEAD = 16;  // rows lie so far from each other that the processor foresees none

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Clears the marks of a run of cells, which begins at the place `start`, that hide.
template <class T>
void hide(const Cells& cells, int64_t start, int64_t count, uint8_t* marks) {
    const T* from = static_cast<const T*>(cells.data) + start;
    const T hidden = static_cast<T>(cells.hidden);
    if (cells.column == 1) {
        for (int64_t j = 0; j < count; j++) marks[j] &= from[j] != hidden;
    } else {
        for (int64_t j = 0; j < count; j++) marks[j] &= from[j * cells.column] != hidden;
    }
}

// One batch item and head. Most masks show most rows something near where the row before sees it, and a few rows see
// all the keys between them: so rows are read up to the first cell they see, but for the keys nobody was found to see.
class Plane {
  public:
    Plane(const Sought& sought, int64_t batch, int64_t head)
        : sought_(sought), batch_(batch), head_(head), open_start_(0), open_stop_(sought.keys), hint_(0) {
        const int64_t plane = batch * sought.heads + head;
        queries_ = sought.queries + plane * sought.rows;
        seen_ = sought.seen + plane * sought.keys;
        memset(seen_, 0, static_cast<size_t>(sought.keys));
        rows_are_alike_ = sought.rows - 1 + sought.low <= 0 && sought.high >= sought.keys - 1;
        for (int64_t n = 0; n < sought.count; n++) rows_are_alike_ &= sought.masks[n].row == 0;
    }

    LeftOut run() {
        const int64_t last = sought_.rows - 1;
        bool all = sees(last);  // which under a causal rule sees most
        memset(queries_, all, static_cast<size_t>(sought_.rows));
        for (int64_t row = 0; row < last && !rows_are_alike_; row++) all &= queries_[row] = sees(row);
        return {!all, open_start_ < open_stop_};
    }

  private:
    const Sought& sought_;
    const int64_t batch_, head_;
    uint8_t *queries_, *seen_;
    int64_t open_start_, open_stop_;  // outside them all keys are seen
    int64_t hint_;                    // where the row before saw something
    bool rows_are_alike_;

    // Whether a row sees anything; marks the keys it sees that were not known to be seen.
    bool sees(int64_t row) {
        const int64_t first = larger(0, row + sought_.low);
        const int64_t last = smaller(smaller(sought_.keys, sought_.stop), row + sought_.high + 1);
        bool any = false;
        for (int64_t j = larger(first, open_start_); j < smaller(last, open_stop_); j += CHUNK)
            any |= look(row, j, smaller(last, open_stop_), seen_ + j);
        while (open_start_ < open_stop_ && seen_[open_start_]) open_start_++;
        while (open_start_ < open_stop_ && seen_[open_stop_ - 1]) open_stop_--;
        if (any || first >= last) return any;
        fetch(smaller(row + AHEAD, sought_.rows - 1), hint_);
        const int64_t start = hint_ < first || hint_ >= last ? first : hint_;
        for (hint_ = start; hint_ < last; hint_ += CHUNK)
            if (look(row, hint_, last, nullptr)) return true;
        for (hint_ = first; hint_ < start; hint_ += CHUNK)
            if (look(row, hint_, start, nullptr)) return true;
        return false;
    }

    void fetch(int64_t row, int64_t column) const {
        for (int64_t n = 0; n < sought_.count; n++) {
            const Cells& cells = sought_.masks[n];
            const int64_t cell = place(cells, row) + smaller(column, sought_.keys - 1) * cells.column;
            __builtin_prefetch(static_cast<const char*>(cells.data) + cell * cells.bytes);
        }
    }

    int64_t place(const Cells& cells, int64_t row) const {
        return batch_ * cells.batch + head_ * cells.head + row * cells.row;
    }

    // Whether a row sees one of CHUNK columns, which are marked if there is room for it.
    bool look(int64_t row, int64_t start, int64_t stop, uint8_t* seen) const {
        uint8_t marks[CHUNK];
        const int64_t count = smaller(CHUNK, stop - start);
        memset(marks, 1, sizeof marks);
        for (int64_t n = 0; n < sought_.count; n++) {
            const Cells& cells = sought_.masks[n];
            const int64_t from = place(cells, row) + start * cells.column;
            if (cells.bytes == 1) hide<uint8_t>(cells, from, count, marks);
            if (cells.bytes == 2) hide<uint16_t>(cells, from, count, marks);
            if (cells.bytes == 4) hide<uint32_t>(cells, from, count, marks);
            if (cells.bytes == 8) hide<uint64_t>(cells, from, count, marks);
        }
        uint8_t any = 0;
        for (int64_t j = 0; j < count; j++) any |= marks[j];
        for (int64_t j = 0; seen && j < count; j++) seen[j] |= marks[j];
        return any != 0;
    }
};

// Zero in rows of all heads, of those batch items and places where `present` has a zero.
void clear_rows(const Problem& p, const View& view, int64_t heads, int64_t rows, int64_t columns, const uint8_t* present,
                int64_t items) {
    const int64_t bytes = p.type == Type::float32 ? 4 : 2;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t i = 0; i < rows; i++) {
            if (present[b % items * rows + i]) continue;
            for (int64_t h = 0; h < heads; h++)
                memset(static_cast<char*>(view.data) + (b * view.batch + h * view.head + i * view.row) * bytes, 0,
                       static_cast<size_t>(columns * bytes));
        }
}

void add_mask(const View& view, int64_t bytes, uint64_t hidden, Sought& sought, const Problem& p) {
    if (!view.data) return;
    sought.masks[sought.count++] = {view.data, bytes, hidden, view.batch, view.head, view.row, view.column};
    if (view.batch) sought.batch = p.batch;
    if (view.head) sought.heads = p.heads;
}

}  // namespace

LeftOut find_reach(const Sought& sought) {
    LeftOut found = {false, false};
    for (int64_t batch = 0; batch < sought.batch; batch++)
        for (int64_t head = 0; head < sought.heads; head++) {
            const LeftOut of_plane = Plane(sought, batch, head).run();
            found.queries |= of_plane.queries, found.keys |= of_plane.keys;
        }
    return found;
}

Absent::Absent(const Problem& p) : problem_(p) {
    sought_.batch = sought_.heads = 1;
    sought_.rows = p.rows, sought_.keys = p.keys;
    sought_.low = p.low, sought_.high = p.high, sought_.stop = p.stop;
    add_mask(p.visible, 1, 0, sought_, p);
    add_mask(p.bias, 4, 0xff800000, sought_, p);
    const int64_t planes = sought_.batch * sought_.heads;
    memory_ = static_cast<uint8_t*>(malloc(static_cast<size_t>(planes * (p.rows + p.keys) + 1)));
    if (!memory_ || p.rows == 0 || p.keys == 0) return;
    sought_.queries = memory_, sought_.seen = memory_ + planes * p.rows;
    left_out_ = find_reach(sought_);
}

Absent::~Absent() { free(memory_); }

void Absent::clear(const View& queries, const View& keys, const View& values) const {
    const Problem& p = problem_;
    if (left_out_.queries) clear_rows(p, queries, p.heads, p.rows, p.dim, sought_.queries, sought_.batch);
    if (!left_out_.keys) return;
    clear_rows(p, keys, p.kv_heads, p.keys, p.dim, sought_.seen, sought_.batch);
    clear_rows(p, values, p.kv_heads, p.keys, p.value_dim, sought_.seen, sought_.batch);
}

}  // namespace clearhead

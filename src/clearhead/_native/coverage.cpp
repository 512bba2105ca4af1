#include "coverage.h"

#include <stdlib.h>
#include <string.h>

namespace clearhead {
namespace {

constexpr int64_t CHUNK = 16;  // cells that are read at a time, until one is visible
constexpr int64_t AHEAD = 16;  // rows lie so far from each other that the processor foresees none

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Clears the marks of those of a run of cells, which begins at the place `start`, that hide.
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
// all the keys between them: so rows are read up to the first cell they see, but for keys that no row was found to see.
class Plane {
  public:
    Plane(const CoverageSearch& search, int64_t batch, int64_t head)
        : search_(search), batch_(batch), head_(head), open_start_(0), open_stop_(search.keys), hint_(0) {
        const int64_t plane = batch * search.heads + head;
        rows_seen_ = search.rows_seen + plane * search.rows;
        keys_seen_ = search.keys_seen + plane * search.keys;
        memset(keys_seen_, 0, static_cast<size_t>(search.keys));
        rows_are_alike_ = search.rows - 1 + search.low <= 0 && search.high >= search.keys - 1;
        rows_are_alike_ &= !search.first || search.span_row == 0;
        for (int64_t n = 0; n < search.count; n++) rows_are_alike_ &= search.masks[n].row == 0;
    }

    FullyMasked run() {
        const int64_t last = search_.rows - 1;
        bool all = sees(last);  // which under a causal rule sees most
        memset(rows_seen_, all, static_cast<size_t>(search_.rows));
        for (int64_t row = 0; row < last && !rows_are_alike_; row++) all &= rows_seen_[row] = sees(row);
        return {!all, open_start_ < open_stop_};
    }

  private:
    const CoverageSearch& search_;
    const int64_t batch_, head_;
    uint8_t *rows_seen_, *keys_seen_;
    int64_t open_start_, open_stop_;  // outside them all keys are seen
    int64_t hint_;                    // where the row before saw something
    bool rows_are_alike_;

    // Whether a row sees anything; marks the keys it sees that were not known to be seen.
    bool sees(int64_t row) {
        int64_t first = larger(0, row + search_.low);
        int64_t last = smaller(smaller(search_.keys, search_.stop), row + search_.high + 1);
        if (search_.first) {
            const int64_t place = batch_ * search_.span_batch + row * search_.span_row;
            first = larger(first, search_.first[place]), last = smaller(last, search_.last[place]);
        }
        bool any = false;
        for (int64_t j = larger(first, open_start_); j < smaller(last, open_stop_); j += CHUNK)
            any |= look(row, j, smaller(last, open_stop_), keys_seen_ + j);
        while (open_start_ < open_stop_ && keys_seen_[open_start_]) open_start_++;
        while (open_start_ < open_stop_ && keys_seen_[open_stop_ - 1]) open_stop_--;
        if (any || first >= last) return any;
        fetch(smaller(row + AHEAD, search_.rows - 1), hint_);
        const int64_t start = hint_ < first || hint_ >= last ? first : hint_;
        for (hint_ = start; hint_ < last; hint_ += CHUNK)
            if (look(row, hint_, last, nullptr)) return true;
        for (hint_ = first; hint_ < start; hint_ += CHUNK)
            if (look(row, hint_, start, nullptr)) return true;
        return false;
    }

    void fetch(int64_t row, int64_t column) const {
        for (int64_t n = 0; n < search_.count; n++) {
            const Cells& cells = search_.masks[n];
            const int64_t cell = place(cells, row) + smaller(column, search_.keys - 1) * cells.column;
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
        for (int64_t n = 0; n < search_.count; n++) {
            const Cells& cells = search_.masks[n];
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


void add_mask(const View& view, int64_t bytes, uint64_t hidden, CoverageSearch& search, const Problem& p) {
    if (!view.data) return;
    search.masks[search.count++] = {view.data, bytes, hidden, view.batch, view.head, view.row, view.column};
    if (view.batch) search.batch = p.batch;
    if (view.head) search.heads = p.heads;
}

}  // namespace

FullyMasked find_coverage(const CoverageSearch& search) {
    FullyMasked found = {false, false};
    for (int64_t batch = 0; batch < search.batch; batch++)
        for (int64_t head = 0; head < search.heads; head++) {
            const FullyMasked of_plane = Plane(search, batch, head).run();
            found.rows |= of_plane.rows, found.keys |= of_plane.keys;
        }
    return found;
}

bool may_hide_altogether(const Problem& p) {
    if (p.rows == 0 || p.keys == 0) return false;
    if (p.first || p.visible.data || p.bias.data) return true;
    const int64_t stop = smaller(p.stop, p.keys);
    const bool all_rows = p.high >= 0 && p.low <= p.high && stop > 0 && stop - p.low >= p.rows;
    return !all_rows || p.low > 0 || stop < p.keys || p.rows + p.high < p.keys;
}

Isolated::Isolated(const Problem& p) : problem_(p), copy_(p) {
    search_.batch = search_.heads = 1;
    search_.rows = p.rows, search_.keys = p.keys;
    search_.low = p.low, search_.high = p.high, search_.stop = p.stop;
    search_.first = p.first, search_.last = p.last, search_.span_batch = p.span_batch, search_.span_row = p.span_row;
    if (p.first && p.span_batch) search_.batch = p.batch;
    add_mask(p.visible, 1, 0, search_, p);
    add_mask(p.bias, 4, 0xff800000, search_, p);
    const int64_t planes = search_.batch * search_.heads;
    uint8_t* seen = static_cast<uint8_t*>(allocate(planes * (p.rows + p.keys)));
    if (!seen) return;
    search_.rows_seen = seen, search_.keys_seen = seen + planes * p.rows;
    hidden_ = find_coverage(search_);
    if (hidden_.rows) {
        copy_rows(&Problem::query, p.dim);
        if (p.output_gradient.data) copy_rows(&Problem::output_gradient, p.value_dim);
        if (p.lse_gradient) copy_lse_gradient();
    }
    if (hidden_.keys) {
        copy_keys(&Problem::key, p.dim);
        copy_keys(&Problem::value, p.value_dim);
    }
}

Isolated::~Isolated() {
    for (void* memory : memory_) free(memory);
}

void* Isolated::allocate(int64_t bytes) {
    void* memory = malloc(static_cast<size_t>(bytes) + 1);
    enough_memory_ = enough_memory_ && memory;
    return memory_[count_++] = memory;
}

bool Isolated::row_seen(int64_t batch, int64_t head, int64_t row) const {
    const int64_t plane = batch % search_.batch * search_.heads + head % search_.heads;
    return search_.rows_seen[plane * search_.rows + row];
}

bool Isolated::key_seen(int64_t batch, int64_t kv_head, int64_t key) const {
    const int64_t group = search_.heads == 1 ? 1 : problem_.group(), first = search_.heads == 1 ? 0 : kv_head * group;
    bool seen = false;
    for (int64_t head = first; head < first + group; head++)
        seen |= search_.keys_seen[(batch % search_.batch * search_.heads + head) * search_.keys + key] != 0;
    return seen;
}

namespace {

// Copies (batch, heads, rows) of `bytes` each, zeros where they are not seen; returns a view of the copy.
template <class Seen>
View copy_seen(const View& from, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int64_t bytes, void* to,
               const Seen& seen) {
    char* row = static_cast<char*>(to);
    const size_t size = static_cast<size_t>(columns * bytes);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < rows; i++, row += size) {
                const int64_t place = b * from.batch + h * from.head + i * from.row;
                if (seen(b, h, i))
                    memcpy(row, static_cast<const char*>(from.data) + place * bytes, size);
                else
                    memset(row, 0, size);
            }
    return {to, heads * rows * columns, rows * columns, columns, 1};
}

void clear_row(const View& view, int64_t batch, int64_t head, int64_t row, int64_t columns, int64_t bytes) {
    const int64_t place = batch * view.batch + head * view.head + row * view.row;
    memset(static_cast<char*>(view.data) + place * bytes, 0, static_cast<size_t>(columns * bytes));
}

}  // namespace

void Isolated::copy_rows(View Problem::* view, int64_t columns) {
    const Problem& p = problem_;
    void* memory = allocate(p.batch * p.heads * p.rows * columns * p.bytes());
    if (!memory) return;
    copy_.*view = copy_seen(p.*view, p.batch, p.heads, p.rows, columns, p.bytes(), memory,
                            [&](int64_t b, int64_t h, int64_t i) { return row_seen(b, h, i); });
}

void Isolated::copy_keys(View Problem::* view, int64_t columns) {
    const Problem& p = problem_;
    void* memory = allocate(p.batch * p.kv_heads * p.keys * columns * p.bytes());
    if (!memory) return;
    copy_.*view = copy_seen(p.*view, p.batch, p.kv_heads, p.keys, columns, p.bytes(), memory,
                            [&](int64_t b, int64_t h, int64_t j) { return key_seen(b, h, j); });
}

void Isolated::copy_lse_gradient() {
    const Problem& p = problem_;
    const int64_t places = (p.batch - 1) * p.lse_batch + (p.heads - 1) * p.lse_head + p.rows;
    float* to = static_cast<float*>(allocate(places * static_cast<int64_t>(sizeof(float))));
    if (!to) return;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t i = 0; i < p.rows; i++) {
                const int64_t place = p.row_place(b, h, i);
                to[place] = row_seen(b, h, i) ? p.lse_gradient[place] : 0;
            }
    copy_.lse_gradient = to;
}

void Isolated::clear_gradients() const {
    const Problem& p = problem_;
    for (int64_t b = 0; b < p.batch; b++) {
        for (int64_t h = 0; hidden_.rows && h < p.heads; h++)
            for (int64_t i = 0; i < p.rows; i++) {
                if (row_seen(b, h, i)) continue;
                clear_row(p.query_gradient, b, h, i, p.dim, p.bytes());
                const int64_t place = p.row_place(b, h, i);
                p.correction[place] = p.lse_gradient ? -p.lse_gradient[place] : 0;  // δ is zero
            }
        for (int64_t h = 0; hidden_.keys && h < p.kv_heads; h++)
            for (int64_t j = 0; j < p.keys; j++) {
                if (key_seen(b, h, j)) continue;
                clear_row(p.key_gradient, b, h, j, p.dim, p.bytes());
                clear_row(p.value_gradient, b, h, j, p.value_dim, p.bytes());
            }
    }
}

}  // namespace clearhead

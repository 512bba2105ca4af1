#include "coverage.h"

namespace clearhead {
namespace {

constexpr int64_t CHUNK = 16;  // cells that are read together, until one is visible
constexpr int64_t AHEAD = 16;  // rows to prefetch, which are too far apart for the processor's prefetcher

// Clears the marks of hidden cells among the `count` cells of a row from `start` on.
template <class T>
void hide(const Cells& cells, const char* row, int64_t start, int64_t count, uint8_t* marks) {
    const T* from = reinterpret_cast<const T*>(row) + start * cells.column;
    const T hidden = static_cast<T>(cells.hidden);
    if (cells.column == 1) {
        for (int64_t j = 0; j < count; j++) marks[j] &= from[j] != hidden;
    } else {
        for (int64_t j = 0; j < count; j++) marks[j] &= from[j * cells.column] != hidden;
    }
}

// The mask of one batch item and head. In most masks neighbouring rows see similar keys, and a few rows together see all
// keys. So a row is read up to its first visible cell, except at keys that no earlier row sees.
class Plane {
  public:
    Plane(const CoverageSearch& search, int64_t batch, int64_t head)
        : search_(search), batch_(batch), head_(head), open_start_(0), open_stop_(search.keys), hint_(0) {
        const int64_t plane = batch * search.heads + head;
        rows_seen_ = search.rows_seen + plane * search.rows;
        keys_seen_ = search.keys_seen + plane * search.keys;
        memset(keys_seen_, 0, static_cast<size_t>(search.keys));
        rows_are_alike_ = search.rows - 1 + search.low <= 0 && search.high >= search.keys - 1;
        rows_are_alike_ &= !search.last || search.range_row == 0;
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
    int64_t open_start_, open_stop_;  // all keys outside of this range are seen
    int64_t hint_;                    // a visible column of the previous row
    bool rows_are_alike_;

    // Whether a row sees a key. Marks its visible keys that were unseen so far.
    bool sees(int64_t row) {
        const auto [first, last] = search_.range(batch_, row);
        bool any = false;
        for (int64_t j = larger(first, open_start_); j < smaller(last, open_stop_); j += CHUNK)
            any |= look(row, j, smaller(last, open_stop_), keys_seen_ + j);
        while (open_start_ < open_stop_ && keys_seen_[open_start_]) open_start_++;
        while (open_start_ < open_stop_ && keys_seen_[open_stop_ - 1]) open_stop_--;
        if (any || first == last) return any;
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
            const int64_t offset = smaller(column, search_.keys - 1) * cells.column * cells.bytes;
            __builtin_prefetch(cells.address(batch_, head_, row, cells.bytes) + offset);
        }
    }

    // Whether a row sees one of CHUNK columns. Marks these unless `key_marks` is null.
    bool look(int64_t row, int64_t start, int64_t stop, uint8_t* key_marks) const {
        uint8_t marks[CHUNK];
        const int64_t count = smaller(CHUNK, stop - start);
        memset(marks, 1, sizeof marks);
        for (int64_t n = 0; n < search_.count; n++) {
            const Cells& cells = search_.masks[n];
            const char* from = cells.address(batch_, head_, row, cells.bytes);
            if (cells.bytes == 1) hide<uint8_t>(cells, from, start, count, marks);
            if (cells.bytes == 2) hide<uint16_t>(cells, from, start, count, marks);
            if (cells.bytes == 4) hide<uint32_t>(cells, from, start, count, marks);
            if (cells.bytes == 8) hide<uint64_t>(cells, from, start, count, marks);
        }
        uint8_t any = 0;
        for (int64_t j = 0; j < count; j++) any |= marks[j];
        for (int64_t j = 0; key_marks && j < count; j++) key_marks[j] |= marks[j];
        return any != 0;
    }
};

void add_mask(const View& view, int64_t bytes, uint64_t hidden, CoverageSearch& search, const Problem& p) {
    if (!view.data) return;
    search.masks[search.count++] = {view, bytes, hidden};
    if (view.batch) search.batch = p.batch;
    if (view.head) search.heads = p.heads;
}

}  // namespace

FullyMasked find_coverage(const CoverageSearch& search) {
    FullyMasked masked = {false, false};
    for (int64_t batch = 0; batch < search.batch; batch++)
        for (int64_t head = 0; head < search.heads; head++) {
            const FullyMasked of_plane = Plane(search, batch, head).run();
            masked.rows |= of_plane.rows, masked.keys |= of_plane.keys;
        }
    return masked;
}

bool may_hide_altogether(const Problem& p) {
    if (p.rows == 0 || p.keys == 0) return false;
    if (p.last || p.visible.data || p.bias.data) return true;
    const int64_t stop = smaller(p.stop, p.keys);
    const bool all_rows = p.high >= 0 && p.low <= p.high && stop > 0 && stop - p.low >= p.rows;
    return !all_rows || p.low > 0 || stop < p.keys || p.rows + p.high < p.keys;
}

Isolated::Isolated(const Problem& p) : problem_(p), copy_(p) {
    static_cast<RowRanges&>(search_) = p;
    search_.heads = 1, search_.batch = p.last && p.range_batch ? p.batch : 1;
    add_mask(p.visible, 1, 0, search_, p);
    add_mask(p.bias, 4, 0xff800000, search_, p);
    const int64_t planes = search_.batch * search_.heads;
    search_.rows_seen = reinterpret_cast<uint8_t*>(allocate(planes * (p.rows + p.keys)));
    search_.keys_seen = search_.rows_seen + planes * p.rows;
    hidden_ = find_coverage(search_);
    copy_operand(&Problem::query, Axis::rows, p.dim);
    copy_operand(&Problem::output_gradient, Axis::rows, p.value_dim);
    copy_operand(&Problem::key, Axis::keys, p.dim);
    copy_operand(&Problem::value, Axis::keys, p.value_dim);
    if (!hidden_.rows || !p.lse_gradient) return;
    const int64_t places = p.row_place(p.batch - 1, p.heads - 1, p.rows);
    float* to = reinterpret_cast<float*>(allocate(places * static_cast<int64_t>(sizeof(float))));
    each(Axis::rows, [&](int64_t b, int64_t h, int64_t i, bool visible) {
        const int64_t place = p.row_place(b, h, i);
        to[place] = visible ? p.lse_gradient[place] : 0;
    });
    copy_.lse_gradient = to;
}

char* Isolated::allocate(int64_t bytes) {
    memory_.emplace_back(new char[static_cast<size_t>(bytes)]);
    return memory_.back().get();
}

bool Isolated::is_visible(Axis axis, int64_t batch, int64_t head, int64_t index) const {
    const int64_t first_plane = batch % search_.batch * search_.heads;
    if (axis == Axis::rows) return search_.rows_seen[(first_plane + head % search_.heads) * search_.rows + index];
    const int64_t group = search_.heads == 1 ? 1 : problem_.group(), first = search_.heads == 1 ? 0 : head * group;
    bool any = false;
    for (int64_t plane = first_plane + first; plane < first_plane + first + group; plane++)
        any |= search_.keys_seen[plane * search_.keys + index] != 0;
    return any;
}

template <class Work>
void Isolated::each(Axis axis, const Work& work) const {
    const Problem& p = problem_;
    const bool rows = axis == Axis::rows;
    if (!(rows ? hidden_.rows : hidden_.keys)) return;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < (rows ? p.heads : p.kv_heads); h++)
            for (int64_t i = 0; i < (rows ? p.rows : p.keys); i++) work(b, h, i, is_visible(axis, b, h, i));
}

void Isolated::copy_operand(View Problem::* view, Axis axis, int64_t columns) {
    const Problem& p = problem_;
    const bool rows = axis == Axis::rows;
    if (!(p.*view).data || !(rows ? hidden_.rows : hidden_.keys)) return;
    const int64_t matrix = (rows ? p.rows : p.keys) * columns, heads = rows ? p.heads : p.kv_heads;
    copy_.*view = {allocate(p.batch * heads * matrix * p.bytes()), heads * matrix, matrix, columns, 1};
    each(axis, [&](int64_t b, int64_t h, int64_t i, bool) {
        memcpy((copy_.*view).address(b, h, i, p.bytes()), (p.*view).address(b, h, i, p.bytes()),
               static_cast<size_t>(columns * p.bytes()));
    });
    clear(copy_.*view, axis, columns);
}

void Isolated::clear(const View& view, Axis axis, int64_t columns) const {
    const int64_t bytes = problem_.bytes();
    each(axis, [&](int64_t b, int64_t h, int64_t i, bool visible) {
        if (!visible) memset(view.address(b, h, i, bytes), 0, static_cast<size_t>(columns * bytes));
    });
}

void Isolated::clear_gradients() const {
    const Problem& p = problem_;
    clear(p.query_gradient, Axis::rows, p.dim);
    clear(p.key_gradient, Axis::keys, p.dim);
    clear(p.value_gradient, Axis::keys, p.value_dim);
    each(Axis::rows, [&](int64_t b, int64_t h, int64_t i, bool visible) {
        const int64_t place = p.row_place(b, h, i);
        if (!visible) p.correction[place] = p.lse_gradient ? -p.lse_gradient[place] : 0;  // δ is zero
    });
}

}  // namespace clearhead

// Statistics of the weights, and the output beside them, from all scores of a few tiles ("score panels") at once:
//   1. scores against every key a tile sees, with the row maxima of its rows;
//   2. weights e^(s − row maximum) in place of the scores, their sums, and their product with the values;
//   3. sums over the rows of a tile, now that each row's total is known.
// A panel grows only with the number of keys, and QKᵀ is computed once.
#pragma once
#include "forward.h"

namespace clearhead::ISA {

constexpr int PIECE = GROUP;                   // keys whose row maxima are stored, to find the largest scores quickly
constexpr int64_t PANEL_FLOATS = 800 * 1024;  // of panels that share reads of keys and values

// Candidates for the `count` largest scores of each row, and their keys: (capacity × TILE).
struct Largest {
    int64_t count;
    float* scores;
    int32_t* keys;
    float limit[TILE];  // candidates are larger than this
    int32_t counts[TILE];

    int64_t capacity() const { return 2 * count + 16; }
};

struct ScorePanel {
    ForwardTile tile;
    Largest largest;
    int64_t start, stop;            // every key that any row may see, multiples of GROUP
    float *scores, *row_maxima;          // (keys × V·LANES), later the weights; (pieces × V·LANES)
    int32_t* visible_blocks;                  // of each block: whether any row sees a key of it
    float* raw_max;                 // row maxima before soft-cap and bias (V·LANES), or null
    double shift[TILE];             // subtracted from scores in double precision, in units of log 2; else 0
    float inner[TILE];              // Σ e^(s − row maximum) · (s − row maximum), in units of log 2
    float total_inner[TILE];        // of earlier runs
    float visible[TILE];            // the number of visible keys of each row
    float factor[TILE];             // from e^(s − row maximum) to p
    float counted[TILE];            // 1 for rows that sums over rows include, else 0

    float* at(int64_t key) const { return scores + (key - start) * tile.vectors * LANES; }
    int64_t first_block() const { return start / BLOCK * BLOCK; }
    int64_t number(int64_t block) const { return (block - first_block()) / BLOCK; }
    float* maxima_of(int64_t block) const { return row_maxima + number(block) * (BLOCK / PIECE) * tile.vectors * LANES; }
};

// Rows of the next block, which are prefetched gradually.
template <class T>
struct Next {
    const T* rows = nullptr;
    int64_t stride = 0, columns = 0, count = 0;
};

// The visible keys [start, stop) of one block, and their rows of keys or values.
template <class T>
struct Part {
    int64_t start, stop, block;
    const float* rows = nullptr;
    Next<T> next = {};

    int64_t count() const { return stop - start; }
};

// Prefetches the share of `step` steps out of `all`.
template <class T>
INLINE void fetch_next(const Next<T>& next, int64_t done, int64_t step, int64_t all) {
    constexpr int64_t LINE = 64 / sizeof(T);
    const int64_t stop = (done + step) * next.count / all;
    for (int64_t j = done * next.count / all; j < stop; j++)
        for (int64_t d = 0; d < next.columns; d += LINE) __builtin_prefetch(next.rows + j * next.stride + d, 0, 2);
}

// Rows of floats without gaps are read in place.
INLINE const float* in_place(const float* rows, bool without_gaps) { return without_gaps ? rows : nullptr; }
template <class T>
INLINE const float* in_place(const T*, bool) {
    return nullptr;
}

// Calls work(start, stop, block) for the visible part of each block.
template <class Work>
INLINE void each_part(const ScorePanel& panel, const Work& work) {
    for (int64_t block = panel.first_block(); block < panel.stop; block += BLOCK)
        if (panel.visible_blocks[panel.number(block)])
            work(larger(block, panel.start), smaller(block + BLOCK, panel.stop), block);
}

// to[j] += the sum over lanes and vectors of cell(j, v), for KEYS keys.
template <int V, int KEYS, class Cell>
INLINE void add_some_columns(int64_t j, float* to, const Cell& cell) {
    Floats square[LANES];
    UNROLL for (int t = 0; t < LANES; t++) {
        square[t] = Floats{};
        if (t >= KEYS) continue;
        UNROLL for (int v = 0; v < V; v++) square[t] += cell(j + t, v);
    }
    store(to + j, load(to + j) + sums(square));
}

// The same for `count` keys, a multiple of GROUP.
template <int V, class Cell>
INLINE void add_columns(int64_t count, float* to, const Cell& cell) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) add_some_columns<V, LANES>(j, to, cell);
    if (j < count) add_some_columns<V, GROUP>(j, to, cell);
}

// Counts the visible keys of each row and, in `viewers`, the counted rows that see each key of a part.
template <int V, MaskForm FORM>
static void count_visible(ScorePanel& panel, int64_t count, const TileMask& mask, float* viewers) {
    if (FORM == MaskForm::everything) {
        float rows = 0;
        for (int64_t lane = 0; lane < panel.tile.count; lane++) rows += panel.counted[lane];
        for (int lane = 0; lane < V * LANES; lane++) panel.visible[lane] += static_cast<float>(count);
        for (int64_t j = 0; viewers && j < count; j++) viewers[j] += rows;
        return;
    }
    const auto where_seen = [&](int64_t j, int v, Floats x) {
        return masked<FORM, V>(Floats{}, mask, j, v) > splat(-INFINITY) ? x : Floats{};
    };
    Floats counted[V];
    for (int v = 0; v < V; v++) {
        Floats visible = load(panel.visible + v * LANES);
        counted[v] = load(panel.counted + v * LANES);
        for (int64_t j = 0; j < count; j++) visible += where_seen(j, v, splat(1.f));
        store(panel.visible + v * LANES, visible);
    }
    if (viewers) add_columns<V>(count, viewers, [&](int64_t j, int v) { return where_seen(j, v, counted[v]); });
}

}  // namespace clearhead::ISA

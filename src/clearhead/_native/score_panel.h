// Statistics of the weights, and the output beside them, from all scores of a few tiles ("score panels") at once:
//   1. scores against every key a tile sees, with the row maxima of its rows;
//   2. weights e^(s − row maximum) in place of the scores, their sums, and their product with the values;
//   3. sums over the rows of a tile, now that each row's total is known.
// A panel grows only with the number of keys, and QKᵀ is computed once.
#pragma once
#include "forward.h"

namespace clearhead::ISA {

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
    int64_t start, stop;            // every key that any row may see, multiples of OCTET
    float *scores, *row_maxima;          // (keys × V·LANES), later the weights; (octets × V·LANES)
    int32_t* visible_blocks;                  // of each block: whether any row sees a key of it
    float* raw_max;                 // row maxima before soft-cap and bias (V·LANES), or null
    double shift[TILE];             // subtracted from scores in double precision, in units of log 2; else 0
    float inner[TILE];              // Σ e^(s − row maximum) · (s − row maximum), in units of log 2
    float total_inner[TILE];        // of earlier runs
    float visible[TILE];            // the number of visible keys of each row
    float factor[TILE];             // from e^(s − row maximum) to p
    float counted[TILE];            // 1 for rows that sums over rows include, else 0
    double* masses;                 // (mass_count × TILE): Σ e^(s − row maximum) of some keys
    int32_t* labels;                // (mass_count × TILE)
    int64_t lowest_row, highest_row;

    float* at(int64_t key) const { return scores + (key - start) * tile.vectors * LANES; }
    int64_t first_block() const { return start / BLOCK * BLOCK; }
    int64_t number(int64_t block) const { return (block - first_block()) / BLOCK; }
    float* maxima_of(int64_t block) const { return row_maxima + number(block) * (BLOCK / OCTET) * tile.vectors * LANES; }
};

// The visible keys [start, stop) of the block from `first` on, and their rows of keys or values.
struct KeyBlock {
    int64_t start, stop, first;
    const float* rows;

    int64_t count() const { return stop - start; }
};

// Calls work(start, stop, block) for the visible keys of each block that any row sees.
template <class Work>
INLINE void each_visible_block(const ScorePanel& panel, const Work& work) {
    for (int64_t block = panel.first_block(); block < panel.stop; block += BLOCK)
        if (panel.visible_blocks[panel.number(block)])
            work(larger(block, panel.start), smaller(block + BLOCK, panel.stop), block);
}

// to[j] += the sum over lanes and vectors of cell(j, v), for `count` keys.
template <int V, class Cell>
INLINE void add_columns(int64_t count, float* to, const Cell& cell) {
    for (int64_t j = 0; j < count; j += LANES) {
        Floats square[LANES];
        UNROLL for (int t = 0; t < LANES; t++) {
            square[t] = Floats{};
            if (j + t >= count) continue;
            UNROLL for (int v = 0; v < V; v++) square[t] += cell(j + t, v);
        }
        store(to + j, load(to + j) + sums(square));
    }
}

// Counts the visible keys of each row and, in `viewers`, the counted rows that see each key of a block.
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

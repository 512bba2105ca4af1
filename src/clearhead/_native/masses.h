// Masses: the sums of the weights of a row over some of its keys, those of its label and at some distances. Each block is
// added as soon as its weights are known, while they are in the cache.
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

// The keys of one mass in one block that some row of a panel may count, and whether some row counts only a part of them.
struct MassRange {
    int64_t start, stop;
    int32_t low, high;
    bool cuts;
};

static int64_t masses_size(const Statistics& s) { return 3 * s.mass_count * TILE; }

static void open_masses(const Problem& p, const Statistics& s, int64_t batch, float*& scratch, ScorePanel& panel) {
    panel.masses = reinterpret_cast<double*>(take(scratch, 2 * s.mass_count * TILE));
    panel.labels = reinterpret_cast<int32_t*>(take(scratch, s.mass_count * TILE));
    panel.lowest_row = INT32_MAX, panel.highest_row = 0;
    for (int lane = 0; lane < panel.tile.vectors * LANES; lane++) {
        const int64_t row = panel.tile.row[lane];
        panel.lowest_row = smaller(panel.lowest_row, row), panel.highest_row = larger(panel.highest_row, row);
        for (int64_t m = 0; m < s.mass_count; m++)
            panel.labels[m * TILE + lane] = s.query_labels[(m * p.batch + batch) * p.rows + row];
    }
    for (int64_t n = 0; n < s.mass_count * TILE; n++) panel.masses[n] = 0;
}

static MassRange mass_range(const Problem& p, const Statistics& s, const ScorePanel& panel, const KeyBlock& block, int64_t m) {
    const int64_t low = larger(-INT32_MAX / 2, s.mass_ranges[3 * m]), high = smaller(INT32_MAX / 2, s.mass_ranges[3 * m + 1]);
    MassRange range = {};
    range.start = larger(block.start, panel.lowest_row + low);
    range.stop = smaller(smaller(block.stop, p.keys), panel.highest_row + high + 1);
    range.low = static_cast<int32_t>(low), range.high = static_cast<int32_t>(high);
    range.cuts = panel.highest_row + low > range.start || panel.lowest_row + high < range.stop - 1;
    return range;
}

// Adds the weights of the keys of a range to the mass of each row.
template <int V, bool CUTS, bool LABELLED>
static void add_mass(const ScorePanel& panel, const MassRange& range, const int32_t* labels, const int32_t* keys, double* to) {
    Floats sums[V] = {};
    Ints rows[V], own[V];
    for (int v = 0; v < V; v++) {
        rows[v] = load(panel.tile.row + v * LANES);
        own[v] = load(labels + v * LANES);
    }
    const float* weights = panel.at(range.start);
    for (int64_t j = range.start; j < range.stop; j++, weights += V * LANES) {
        const Ints label = splat(LABELLED ? keys[j] : 0), place = splat(static_cast<int32_t>(j));
        UNROLL for (int v = 0; v < V; v++) {
            const Floats x = load(weights + v * LANES);
            if constexpr (CUTS) {
                const Ints away = place - rows[v];
                const Ints within = (away >= splat(range.low)) & (away <= splat(range.high));
                sums[v] += (LABELLED ? within & (own[v] == label) : within) ? x : Floats{};
            } else {
                sums[v] += !LABELLED || own[v] == label ? x : Floats{};
            }
        }
    }
    for (int lane = 0; lane < V * LANES; lane++) to[lane] += sums[lane / LANES][lane % LANES];
}

template <int V>
static void add_masses(const Problem& p, const Statistics& s, ScorePanel& panel, const KeyBlock& block, int64_t batch) {
    for (int64_t m = 0; m < s.mass_count; m++) {
        const MassRange range = mass_range(p, s, panel, block, m);
        if (range.start >= range.stop) continue;
        const int32_t *own = panel.labels + m * TILE, *keys = s.key_labels + (m * p.batch + batch) * p.keys;
        double* to = panel.masses + m * TILE;
        if (s.mass_ranges[3 * m + 2]) {
            if (range.cuts) add_mass<V, true, true>(panel, range, own, keys, to);
            else add_mass<V, false, true>(panel, range, own, keys, to);
        } else if (range.cuts) {
            add_mass<V, true, false>(panel, range, own, keys, to);
        } else {
            add_mass<V, false, false>(panel, range, own, keys, to);
        }
    }
}

static void write_masses(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    for (int64_t m = 0; m < s.mass_count; m++)
        for (int64_t lane = 0; lane < tile.count; lane++) {
            const int64_t place = m * p.batch * p.heads * p.rows + p.row_place(batch, tile.head[lane], tile.row[lane]);
            s.mass[place] = static_cast<float>(panel.masses[m * TILE + lane] * panel.factor[lane]);
        }
}

}  // namespace clearhead::ISA

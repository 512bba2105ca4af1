// The weights of a panel as matrices: per head, averaged over heads, or pooled to tiles of rows and keys.
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

// Writes the weights of each head, or adds 1/H of them to the mean over heads.
static void write_weights(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    const bool adds = s.averages(p);
    const float portion = adds ? 1.f / static_cast<float>(p.heads) : 1.f;
    each_part(panel, [&](int64_t start, int64_t stop, int64_t) {
        const int64_t columns = smaller(stop, p.keys) - start;
        each_row_vector(panel.at(start), tile, columns, [&](int64_t lane, int64_t j, Floats x, int64_t count) {
            float* to = s.weights.at<float>(batch, tile.head[lane], tile.row[lane]) + start + j;
            const Floats before = adds ? load_some(to, count) : Floats{};
            store_some(to, before + rounded((portion * panel.factor[lane]) * x), count);
        });
    });
}

// Adds each row's number to one column of the map, or takes the maximum. NaN stays.
static void join_column(const float* cells, const int64_t* tiles, int64_t count, bool takes_max, int64_t columns, double* to) {
    for (int64_t lane = 0; lane < count; lane++) {
        double& cell = to[tiles[lane] * columns];
        const float x = cells[lane];
        cell = !takes_max ? cell + x : x > cell || x != x ? x : cell;
    }
}

// Pools the weights of counted rows to tiles, column by column of the map.
template <int V>
static void pool(const Problem& p, const Statistics& s, const ScorePanel& panel, const TaskSums& sums) {
    const Tile& tile = panel.tile;
    int64_t tiles[TILE];
    for (int64_t lane = 0; lane < tile.count; lane++) tiles[lane] = s.map_row(p, tile.row[lane]) - sums.first_map_row;
    each_part(panel, [&](int64_t start, int64_t stop, int64_t) {
        stop = smaller(stop, p.keys);
        for (int64_t j = start; j < stop;) {
            const int64_t column = j * s.map_columns / p.keys;
            const int64_t next = ((column + 1) * p.keys + s.map_columns - 1) / s.map_columns;  // the first of the next
            Floats cells[V] = {};
            for (; j < smaller(next, stop); j++)
                UNROLL for (int v = 0; v < V; v++) {
                    const Floats x = load(panel.at(j) + v * LANES);
                    cells[v] = s.map_max ? larger(x, cells[v]) : cells[v] + x;
                }
            float sums_of_rows[V * LANES];
            for (int v = 0; v < V; v++) {
                const Floats factor = load(panel.factor + v * LANES) * load(panel.counted + v * LANES);
                store(sums_of_rows + v * LANES, cells[v] * factor);
            }
            join_column(sums_of_rows, tiles, tile.count, s.map_max, s.map_columns, sums.map + column);
        }
    });
}

}  // namespace clearhead::ISA

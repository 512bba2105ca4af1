// Results of the rows of a panel: lse, statistics per row, outputs, sums over rows, statistics of positions (weights of the
// first keys, weights at offsets, distances), and matrices of weights (per head, averaged over heads, or pooled to tiles).
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

// Sums of a row, in units of log 2: Σ e^(s − row maximum), Σ e^(s − row maximum) · (s − row maximum), and two maxima.
struct RowSums {
    double sum, inner, row_max, raw_max;
    float visible;
};

// Writes lse and statistics of a row. Returns the factor from e^(s − row maximum) to p.
static float finish_row_statistics(const Problem& p, const Statistics& s, int64_t batch, int64_t head, int64_t row,
                                   const RowSums& sums) {
    const int64_t place = p.row_place(batch, head, row);
    const double sum = sums.sum, ln2 = LN_OF_2;
    const double row_max = sum == 0 ? -INFINITY : sum != sum ? NAN : sums.row_max * ln2;
    double factor = sum == 0 ? 0 : 1 / sum, entropy = sum == 0 ? 0 : log(sum), lse = row_max + entropy;
    if (p.sinks && sum != 0) {  // one more term of the total, where shift is the larger of row maximum and sink
        const double sink = p.sink(batch, head, row), shift = row_max < sink ? sink : row_max;
        const double total = sum * exp(row_max - shift) + exp(sink - shift);
        factor = exp(row_max - shift) / total;  // from e^(s − row maximum) to e^(s − shift), over the total
        lse = log(total) + shift;
        entropy = sum * factor * (lse - row_max);
    } else if (p.sinks) {
        lse = p.sink(batch, head, row);
    }
    const float to_weight = static_cast<float>(factor);
    if (p.lse) p.lse[place] = lse;
    if (s.largest) s.largest[place] = static_cast<float>(row_max);
    if (s.raw) s.raw[place] = static_cast<float>(sum != sum ? NAN : sums.raw_max * unit_of_raw(p));
    if (s.visible) s.visible[place] = sums.visible;
    if (s.entropy) s.entropy[place] = static_cast<float>(entropy - static_cast<float>(sums.inner) * ln2 * factor);
    if (s.confidence) s.confidence[place] = to_weight;
    return to_weight;
}

// Statistics of each row from its sums, in double.
static void finish_rows(const Problem& p, const Statistics& s, ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    for (int64_t lane = 0; lane < tile.count; lane++) {
        const double raw_max = s.raw ? panel.raw_max[lane] : 0;
        const RowSums sums = {panel.tile.sum[lane], panel.inner[lane],
                              panel.tile.row_max[lane] + panel.shift[lane], raw_max, panel.visible[lane]};
        panel.factor[lane] = finish_row_statistics(p, s, batch, tile.head[lane], tile.row[lane], sums);
    }
}

static int64_t width_of_output(const Problem& p) { return p.output.data ? round_up(p.value_dim, STEP) : 0; }

template <class T>
static void write_output(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    lanes_to_rows<T>(panel.tile.sums, tile, batch, p.value_dim, panel.factor, p.output);
    if (!s.norm) return;
    for (int64_t lane = 0; lane < tile.count; lane++) {
        double sum = 0;
        for (int64_t d = 0; d < p.value_dim; d++) {
            const double x = panel.tile.sums[d * tile.vectors * LANES + lane];
            sum += x * x;
        }
        const int64_t place = p.row_place(batch, tile.head[lane], tile.row[lane]);
        s.norm[place] = static_cast<float>(sqrt(sum)) * panel.factor[lane];
    }
}

// Adds the weights of each key of a block, row by row in the lanes.
template <int V>
static void receive_block(const ScorePanel& panel, int64_t start, int64_t stop, float* lanes) {
    Floats factors[V];
    for (int v = 0; v < V; v++) factors[v] = load(panel.factor + v * LANES) * load(panel.counted + v * LANES);
    const float* weights = panel.at(start);
    for (int64_t j = 0; j < stop - start; j++, weights += V * LANES) {
        Floats x = load(lanes + j * LANES);
        UNROLL for (int v = 0; v < V; v++) x += load(weights + v * LANES) * factors[v];
        store(lanes + j * LANES, x);
    }
}

// Adds to sums, and adds the rounding errors to `errors` (Knuth's two-sum).
INLINE void add_with_error(Floats x, float* sums, float* errors) {
    const Floats before = load(sums), after = before + x, added = after - before;
    store(sums, after);
    store(errors, load(errors) + ((before - (after - added)) + (x - added)));
}

// Σ p of each key over the rows of some panels. Lanes are summed last.
static void receive(const Problem& p, const ScorePanel* panels, int64_t count, const TaskSums& to) {
    for (int64_t block = 0; block < p.keys; block += BLOCK) {
        float lanes[BLOCK * LANES] = {};
        bool any = false;
        for (int64_t n = 0; n < count; n++) {
            const ScorePanel& panel = panels[n];
            const int64_t start = larger(block, panel.start), stop = smaller(block + BLOCK, panel.stop);
            if (start >= stop || !panel.visible_blocks[panel.number(block)]) continue;
            any = true;
            by_vectors(panel.tile.vectors, [&](auto v) {
                receive_block<v.value>(panel, start, stop, lanes + (start - block) * LANES);
            });
        }
        for (int64_t j = 0; any && j < smaller(BLOCK, p.keys - block); j += LANES) {
            Floats square[LANES];
            UNROLL for (int t = 0; t < LANES; t++) square[t] = load(lanes + (j + t) * LANES);
            add_with_error(sums(square), to.received + block + j, to.lost + block + j);
        }
    }
}

// The panel's number for a key in the lane of a row. Null if no row sees a key of its block.
static const float* cell_of(const ScorePanel& panel, int64_t key, int64_t lane) {
    if (key < panel.start || key >= panel.stop) return nullptr;
    if (!panel.visible_blocks[panel.number(key / BLOCK * BLOCK)]) return nullptr;
    return panel.at(key) + lane;
}

static void write_sink(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    for (int64_t lane = 0; lane < tile.count; lane++) {
        const int32_t* keys = s.first_keys + (batch * p.heads + tile.head[lane]) * s.sink_keys;
        double sum = 0;
        for (int64_t n = 0; n < s.sink_keys; n++) {
            const float* weight = cell_of(panel, keys[n], lane);
            if (weight) sum += *weight;
        }
        s.sink[p.row_place(batch, tile.head[lane], tile.row[lane])] = static_cast<float>(sum * panel.factor[lane]);
    }
}

// Calls work(place of the weight, key, lane) for each row and offset.
template <class Work>
INLINE void each_stripe(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch, const Work& work) {
    const Tile& tile = panel.tile;
    for (int64_t lane = 0; lane < tile.count; lane++) {
        float* to = s.stripes + p.row_place(batch, tile.head[lane], tile.row[lane]) * s.offset_count;
        for (int64_t n = 0; n < s.offset_count; n++) work(to[n], tile.row[lane] + s.shift + s.offsets[n], lane);
    }
}

// Notes which rows see a key at each offset. This needs scores, because a weight can be zero.
static void find_stripes(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    each_stripe(p, s, panel, batch, [&](float& to, int64_t key, int64_t lane) {
        const float* score = key < p.keys ? cell_of(panel, key, lane) : nullptr;
        to = score && *score > -INFINITY ? 0.f : -1.f;
    });
}

static void write_stripes(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    each_stripe(p, s, panel, batch, [&](float& to, int64_t key, int64_t lane) {
        if (to == 0) to = *cell_of(panel, key, lane) * panel.factor[lane];
    });
}

template <int V>
static void write_distance(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    double total[TILE] = {};
    float place[TILE];
    for (int lane = 0; lane < V * LANES; lane++) place[lane] = static_cast<float>(tile.row[lane] + s.shift);
    each_visible_block(panel, [&](int64_t start, int64_t stop, int64_t) {
        Floats sums[V] = {};
        for (int64_t j = start; j < smaller(stop, p.keys); j++)
            UNROLL for (int v = 0; v < V; v++) {
                const Floats away = load(place + v * LANES) - static_cast<float>(j);
                sums[v] += load(panel.at(j) + v * LANES) * larger(away, -away);
            }
        for (int lane = 0; lane < V * LANES; lane++) total[lane] += sums[lane / LANES][lane % LANES];
    });
    for (int64_t lane = 0; lane < tile.count; lane++) {
        const int64_t to = p.row_place(batch, tile.head[lane], tile.row[lane]);
        s.distance[to] = static_cast<float>(total[lane] * panel.factor[lane]);
    }
}

// Writes the weights of each head, or adds 1/H of them to the mean over heads.
static void write_weights(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    const bool adds = s.averages(p);
    const float portion = adds ? 1.f / static_cast<float>(p.heads) : 1.f;
    each_visible_block(panel, [&](int64_t start, int64_t stop, int64_t) {
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
    for (int64_t lane = 0; lane < tile.count; lane++) tiles[lane] = s.map_row(p, tile.row[lane]);
    each_visible_block(panel, [&](int64_t start, int64_t stop, int64_t) {
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

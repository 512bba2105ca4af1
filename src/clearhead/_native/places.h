// Of a panel's weights what depends on where keys stand: of the first keys, at offsets from the row, and their distance.
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

// What the panel holds for a key in the lane of a row; null where no row sees anything of the key's block.
static const float* held(const ScorePanel& panel, int64_t key, int64_t lane) {
    if (key < panel.start || key >= panel.stop) return nullptr;
    if (!panel.seen[panel.number(key / BLOCK * BLOCK)]) return nullptr;
    return panel.at(key) + lane;
}

static void write_sink(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Rows& rows = panel.tile.rows;
    for (int64_t lane = 0; lane < rows.count; lane++) {
        const int32_t* keys = s.first_keys + (batch * p.heads + rows.head[lane]) * s.sink_keys;
        double sum = 0;
        for (int64_t n = 0; n < s.sink_keys; n++) {
            const float* weight = held(panel, keys[n], lane);
            if (weight) sum += *weight;
        }
        s.sink[p.row_place(batch, rows.head[lane], rows.row[lane])] = static_cast<float>(sum * panel.factor[lane]);
    }
}

// work(where the weight of an offset goes, the key there, its lane)
template <class Work>
INLINE void each_stripe(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch, const Work& work) {
    const Rows& rows = panel.tile.rows;
    for (int64_t lane = 0; lane < rows.count; lane++) {
        float* to = s.stripes + p.row_place(batch, rows.head[lane], rows.row[lane]) * s.offset_count;
        for (int64_t n = 0; n < s.offset_count; n++) work(to[n], rows.row[lane] + s.shift + s.offsets[n], lane);
    }
}

// Notes which rows see a key at each offset, while the panel still holds scores: a weight can be zero.
static void find_stripes(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    each_stripe(p, s, panel, batch, [&](float& to, int64_t key, int64_t lane) {
        const float* score = key < p.keys ? held(panel, key, lane) : nullptr;
        to = score && *score > -INFINITY ? 0.f : -1.f;
    });
}

static void write_stripes(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    each_stripe(p, s, panel, batch, [&](float& to, int64_t key, int64_t lane) {
        if (to == 0) to = *held(panel, key, lane) * panel.factor[lane];
    });
}

template <int V>
static void write_distance(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Rows& rows = panel.tile.rows;
    double total[TILE] = {};
    float place[TILE];
    for (int lane = 0; lane < V * LANES; lane++) place[lane] = static_cast<float>(rows.row[lane] + s.shift);
    each_part(panel, [&](int64_t start, int64_t stop, int64_t) {
        Floats sums[V] = {};
        for (int64_t j = start; j < smaller(stop, p.keys); j++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const Floats away = load(place + v * LANES) - static_cast<float>(j);
                sums[v] += load(panel.at(j) + v * LANES) * larger(away, -away);
            }
        for (int lane = 0; lane < V * LANES; lane++) total[lane] += sums[lane / LANES][lane % LANES];
    });
    for (int64_t lane = 0; lane < rows.count; lane++) {
        const int64_t to = p.row_place(batch, rows.head[lane], rows.row[lane]);
        s.distance[to] = static_cast<float>(total[lane] * panel.factor[lane]);
    }
}

}  // namespace clearhead::ISA

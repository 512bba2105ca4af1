// The largest scores of each row of a panel. The row maxima of its octets give a limit, then each score is compared once.
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

// The k-th largest row maximum of octets, or of a few together, in each lane. At least k scores are as large, and hardly
// more if there are many more octets than k.
static Floats least_of_largest(const ScorePanel& panel, int v, float* best) {
    const int64_t width = panel.tile.vectors * LANES, k = panel.largest.count;
    const int64_t together = (panel.stop - panel.start) / OCTET >= 16 * k ? 4 : 1;
    for (int64_t rank = 0; rank < k; rank++) store(best + rank * LANES, splat(-INFINITY));
    each_visible_block(panel, [&](int64_t start, int64_t stop, int64_t block) {
        const float* row_maxima = panel.maxima_of(block) + v * LANES;
        const int64_t octets = (stop - start) / OCTET;
        for (int64_t n = 0; n < octets; n += together) {
            Floats x = load(row_maxima + n * width);
            for (int64_t next = n + 1; next < smaller(n + together, octets); next++)
                x = larger(load(row_maxima + next * width), x);
            if (!bits(x > load(best + (k - 1) * LANES))) continue;
            for (int64_t rank = 0; rank < k; rank++) {
                const Floats ranked = load(best + rank * LANES);
                store(best + rank * LANES, larger(x, ranked));
                x = x > ranked ? ranked : x;
            }
        }
    });
    return load(best + (k - 1) * LANES);
}

// Clears the lists and sets their limits.
static void expect_largest(ScorePanel& panel) {
    Largest& largest = panel.largest;
    for (int v = 0; v < panel.tile.vectors; v++) {
        const Floats least = least_of_largest(panel, v, largest.scores);
        for (int64_t lane = v * LANES; lane < (v + 1) * LANES; lane++) {
            largest.limit[lane] = nextafterf(least[lane - v * LANES], -INFINITY);
            largest.counts[lane] = 0;
        }
    }
}

// Moves the `count` largest of a row's scores to the front of its list, in falling order.
static void sort_row(Largest& largest, int64_t lane) {
    float* scores = largest.scores + lane;
    int32_t* keys = largest.keys + lane;
    for (int64_t n = 1; n < largest.counts[lane]; n++) {
        const float score = scores[n * TILE];
        const int32_t key = keys[n * TILE];
        int64_t rank = n;
        for (; rank > 0 && scores[(rank - 1) * TILE] < score; rank--) {
            scores[rank * TILE] = scores[(rank - 1) * TILE];
            keys[rank * TILE] = keys[(rank - 1) * TILE];
        }
        scores[rank * TILE] = score;
        keys[rank * TILE] = key;
    }
    if (largest.counts[lane] > largest.count) largest.counts[lane] = static_cast<int32_t>(largest.count);
}

INLINE void note(Largest& largest, int64_t lane, float score, int64_t key) {
    int32_t& count = largest.counts[lane];
    largest.scores[count * TILE + lane] = score;
    largest.keys[count * TILE + lane] = static_cast<int32_t>(key);
    if (++count < largest.capacity()) return;
    sort_row(largest, lane);
    largest.limit[lane] = largest.scores[(largest.count - 1) * TILE + lane];
}

// Notes the scores of an octet that are above their row's limit.
template <int V>
INLINE void find_largest(Largest& largest, const float* scores, const float* row_maxima, int64_t key) {
    UNROLL for (int v = 0; v < V; v++) {
        const float* limit = largest.limit + v * LANES;
        if (!bits(load(row_maxima + v * LANES) > load(limit))) continue;
        for (int t = 0; t < OCTET; t++) {
            const float* row = scores + (t * V + v) * LANES;
            for (uint32_t rows = bits(load(row) > load(limit)); rows; rows &= rows - 1) {
                const int lane = __builtin_ctz(rows);
                note(largest, v * LANES + lane, row[lane], key + t);
            }
        }
    }
}

// Writes the lists as weights in falling order.
static void write_largest(const Problem& p, const Statistics& s, ScorePanel& panel, int64_t batch) {
    const Tile& tile = panel.tile;
    for (int64_t lane = 0; lane < tile.count; lane++) {
        sort_row(panel.largest, lane);
        const int64_t place = p.row_place(batch, tile.head[lane], tile.row[lane]) * s.top;
        float* weights = s.top_weights + place;
        for (int64_t rank = 0; rank < s.top; rank++) {
            const bool has_key = rank < panel.largest.counts[lane];
            weights[rank] = has_key ? panel.largest.scores[rank * TILE + lane] : -INFINITY;
            s.top_keys[place + rank] = has_key ? panel.largest.keys[rank * TILE + lane] : -1;
        }
        for (int64_t rank = 0; rank < s.top; rank += LANES) {
            const int64_t count = smaller(LANES, s.top - rank);
            const Floats shifted = load_some(weights + rank, count) - panel.tile.row_max[lane];
            store_some(weights + rank, exp2(shifted) * panel.factor[lane], count);
        }
        for (int64_t rank = 1; rank < s.top; rank++)
            if (weights[rank] > weights[rank - 1]) weights[rank] = weights[rank - 1];
    }
}

}  // namespace clearhead::ISA

// What is known of the rows of a panel once their sums are: lse and what follows from it, outputs, and what keys receive.
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

// What is known of each row once its sums are: in double, because it is a handful of numbers.
static void finish_rows(const Problem& p, const Statistics& s, ScorePanel& panel, int64_t batch) {
    const Rows& rows = panel.tile.rows;
    for (int64_t lane = 0; lane < rows.count; lane++) {
        const int64_t place = p.row_place(batch, rows.head[lane], rows.row[lane]);
        const double sum = panel.tile.sum[lane], ln2 = LN_OF_2;
        const double highest = panel.tile.row_max[lane] + panel.shift[lane];
        const double row_max = sum == 0 ? -INFINITY : sum != sum ? NAN : highest * ln2;
        double factor = sum == 0 ? 0 : 1 / sum, entropy = sum == 0 ? 0 : log(sum), lse = row_max + entropy;
        if (p.sinks && sum != 0) {  // one more term of the total: with shift the larger of row maximum and sink,
            const double sink = p.sinks[rows.head[lane]], shift = row_max < sink ? sink : row_max;
            const double total = sum * exp(row_max - shift) + exp(sink - shift);
            factor = exp(row_max - shift) / total;  // from e^(s − row maximum) to e^(s − shift), over the total
            lse = log(total) + shift;
            entropy = sum * factor * (lse - row_max);
        } else if (p.sinks) {
            lse = p.sinks[rows.head[lane]];
        }
        if (p.lse) p.lse[place] = lse;
        panel.factor[lane] = static_cast<float>(factor);
        if (s.largest) s.largest[place] = static_cast<float>(row_max);
        if (s.raw) s.raw[place] = static_cast<float>(sum != sum ? NAN : panel.raw_max[lane] * unit_of_raw(p));
        if (s.visible) s.visible[place] = panel.visible[lane];
        if (s.entropy) s.entropy[place] = static_cast<float>(entropy - panel.inner[lane] * ln2 * factor);
        if (s.confidence) s.confidence[place] = panel.factor[lane];
    }
}

static int64_t width_of_output(const Problem& p) { return p.output.data ? round_up(p.value_dim, STEP) : 0; }

template <class T>
static void write_output(const Problem& p, const Statistics& s, const ScorePanel& panel, int64_t batch) {
    const Rows& rows = panel.tile.rows;
    lanes_to_rows<T>(panel.tile.output, rows, batch, p.value_dim, panel.factor, p.output);
    if (!s.norm) return;
    for (int64_t lane = 0; lane < rows.count; lane++) {
        double sum = 0;
        for (int64_t d = 0; d < p.value_dim; d++) {
            const double x = panel.tile.output[d * rows.vectors * LANES + lane];
            sum += x * x;
        }
        const int64_t place = p.row_place(batch, rows.head[lane], rows.row[lane]);
        s.norm[place] = static_cast<float>(sqrt(sum)) * panel.factor[lane];
    }
}

// Adds what each key of a part gets from the rows of a panel, row by row in the lanes.
template <int V>
static void receive_part(const ScorePanel& panel, int64_t start, int64_t stop, float* lanes) {
    Floats factors[V];
    for (int v = 0; v < V; v++) factors[v] = load(panel.factor + v * LANES) * load(panel.counted + v * LANES);
    const float* weights = panel.at(start);
    for (int64_t j = 0; j < stop - start; j++, weights += V * LANES) {
        Floats x = load(lanes + j * LANES);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) x += load(weights + v * LANES) * factors[v];
        store(lanes + j * LANES, x);
    }
}

// Adds to some sums, and what is lost by rounding to their errors (Knuth's two-sum).
INLINE void add_with_error(Floats x, float* sums, float* errors) {
    const Floats before = load(sums), after = before + x, added = after - before;
    store(sums, after);
    store(errors, load(errors) + ((before - (after - added)) + (x - added)));
}

// What each key receives from the rows of some panels, whose lanes are summed last.
static void receive(const Problem& p, const ScorePanel* panels, int64_t count, const TaskSums& to) {
    for (int64_t block = 0; block < p.keys; block += BLOCK) {
        float lanes[BLOCK * LANES] = {};
        bool any = false;
        for (int64_t n = 0; n < count; n++) {
            const ScorePanel& panel = panels[n];
            const int64_t start = larger(block, panel.start), stop = smaller(block + BLOCK, panel.stop);
            if (start >= stop || !panel.seen[panel.number(block)]) continue;
            any = true;
            by_vectors(panel.tile.rows.vectors, [&](auto v) {
                receive_part<v.value>(panel, start, stop, lanes + (start - block) * LANES);
            });
        }
        for (int64_t j = 0; any && j < smaller(BLOCK, p.keys - block); j += LANES) {
            Floats square[LANES];
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++) square[t] = load(lanes + (j + t) * LANES);
            add_with_error(sums(square), to.received + block + j, to.lost + block + j);
        }
    }
}

}  // namespace clearhead::ISA

// Statistics of the weights, from a few panels at a time:
//   1. scores against every key that a row sees, with the row maxima of its octets;
//   2. weights e^(s − row maximum) in place of the scores, their sums, and their product with the values;
//   3. sums over the rows of a panel, now that each row's total is known.
// QKᵀ is computed once, and weights leave the panel only as statistics.
#pragma once
#include "exact.h"
#include "largest.h"
#include "masses.h"
#include "results.h"

namespace clearhead::ISA {

// The scores of a block and the row maxima of its octets.
template <int V, class Fetch>
static void score_block(const Problem& p, ScorePanel& panel, const KeyBlock& block, const TileMask& mask,
                       const Fetch& fetch_next) {
    float* octet_maxima = panel.maxima_of(block.first);
    Floats best[V], raw[V];
    for (int v = 0; v < V; v++) {
        best[v] = load(panel.tile.row_max + v * LANES);
        raw[v] = panel.raw_max ? load(panel.raw_max + v * LANES) : Floats{};
    }
    for (int64_t j = 0; j < block.count(); j += OCTET, octet_maxima += V * LANES) {
        fetch_next(j, OCTET, block.count());
        Floats row_maxima[V];
        for (int v = 0; v < V; v++) row_maxima[v] = splat(-INFINITY);
        const TileMask octet = from_key<V>(mask, j);
        const float* keys = block.rows + j * p.dim;
        float* to = panel.at(block.start + j);
        const int64_t count = smaller(OCTET, block.count() - j);
        if (panel.raw_max) {
            score_any<V, true>(p, panel.tile, keys, count, octet, fetch_nothing, to, row_maxima, raw);
        } else {
            score_any<V>(p, panel.tile, keys, count, octet, fetch_nothing, to, row_maxima);
        }
        for (int v = 0; v < V; v++) {
            store(octet_maxima + v * LANES, row_maxima[v]);
            best[v] = larger(row_maxima[v], best[v]);
        }
    }
    for (int v = 0; v < V; v++) {
        store(panel.tile.row_max + v * LANES, best[v]);
        if (panel.raw_max) store(panel.raw_max + v * LANES, raw[v]);
    }
}

// Turns scores into weights in place, after the largest scores are noted. Each block is summed first, so that sums are
// short.
template <int V>
static void weigh_block(ScorePanel& panel, const KeyBlock& block) {
    Floats row_maxima[V], sums[V], inner[V];
    for (int v = 0; v < V; v++) {
        row_maxima[v] = load(panel.tile.row_max + v * LANES);
        sums[v] = inner[v] = Floats{};
    }
    const float* maxima_of = panel.maxima_of(block.first);
    const Floats lowest = splat(-127.f);  // with a weight of zero, which times this number is zero too
    for (int64_t j = 0; j < block.count(); j += OCTET) {
        float* scores = panel.at(block.start + j);
        if (panel.largest.count) find_largest<V>(panel.largest, scores, maxima_of + j / OCTET * V * LANES, block.start + j);
        UNROLL for (int v = 0; v < V; v++) {
            Floats x[OCTET];
            UNROLL for (int t = 0; t < OCTET; t++) {
                float* place = scores + (t * V + v) * LANES;
                const Floats shifted = larger(lowest, load(place) - row_maxima[v]);  // in this order NaN stays NaN
                x[t] = exp2_within(shifted);
                inner[v] += x[t] * shifted;
                store(place, x[t]);
            }
            sums[v] += sum_of_octet(x);  // as in the forward pass, so that outputs are the same to the bit
        }
    }
    for (int v = 0; v < V; v++) {
        store(panel.tile.sum + v * LANES, load(panel.tile.sum + v * LANES) + sums[v]);
        store(panel.inner + v * LANES, load(panel.inner + v * LANES) + inner[v]);
    }
}

// output += weights · values, of one block.
template <int V, class Fetch>
static void mix_block(ScorePanel& panel, const KeyBlock& block, const Fetch& fetch_next, int64_t width) {
    const float* weights = panel.at(block.start);
    product<false, V>(block.rows, width, weights, V * LANES, block.count(), width, fetch_next,
                      add_to(panel.tile.sums, V * LANES));
}

// Adds the sums of a run to the totals, and begins the next.
static void end_panel_run(ScorePanel& panel) {
    end_run(panel.tile);
    for (int lane = 0; lane < TILE; lane++) panel.total_inner[lane] += panel.inner[lane], panel.inner[lane] = 0;
    panel.tile.summed = 1;  // including the block that is added next
}

static int64_t keys_of_panel(const Problem& p) { return round_up(p.keys, BLOCK); }

static int64_t panels_together(const Problem& p, const Statistics& s) {
    if (s.exact) return 1;
    return larger(1, smaller(MOST_TILES, PANEL_FLOATS / (TILE * keys_of_panel(p) + 1)));
}

// Floats of one panel: scores, row maxima, visible blocks, queries, outputs, largest scores and raw maxima.
static int64_t panel_size(const Problem& p, const Statistics& s) {
    const int64_t keys = keys_of_panel(p), octets = keys / OCTET;
    const int64_t lists = 2 * Largest{s.top}.capacity(), raw_maxima = s.raw ? 1 : 0;
    return (keys + octets + p.dim + 2 * width_of_output(p) + lists + raw_maxima) * TILE + masses_size(s) + round_up(keys / BLOCK, 16);
}

static int64_t statistics_scratch(const Problem& p, const Statistics& s) {
    const int64_t block = (BLOCK + OCTET) * larger(p.dim, width_of_output(p)) + MASK_SCRATCH_FLOATS;
    const int64_t exact = s.exact ? exact_scratch(p, keys_of_panel(p)) : 0;
    return panels_together(p, s) * panel_size(p, s) + block + exact + 64;
}

template <class T>
static void open_panel(const Problem& p, const Statistics& s, const Task& task, int64_t row, float*& scratch,
                       ScorePanel& panel) {
    const int64_t width = width_of_output(p), keys = keys_of_panel(p), batch = task.batch;
    Tile& tile = panel.tile;
    describe_rows(p, batch, task.kv_head, row, task.row_stop, tile);
    panel.start = smaller(p.keys, tile.lowest_first) / OCTET * OCTET;
    panel.stop = larger(panel.start, round_up(tile.highest_last, OCTET));
    panel.scores = take(scratch, keys * TILE);
    panel.row_maxima = take(scratch, keys / OCTET * TILE);
    panel.visible_blocks = reinterpret_cast<int32_t*>(take(scratch, keys / BLOCK));
    panel.tile.query = take(scratch, p.dim * TILE);
    begin_outputs(panel.tile, width, has_totals(p), scratch);
    panel.largest.count = s.top;
    panel.largest.scores = take(scratch, panel.largest.capacity() * TILE);
    panel.largest.keys = reinterpret_cast<int32_t*>(take(scratch, panel.largest.capacity() * TILE));
    panel.raw_max = s.raw ? take(scratch, TILE) : nullptr;
    open_masses(p, s, batch, scratch, panel);
    for (int lane = 0; s.raw && lane < TILE; lane++) panel.raw_max[lane] = -INFINITY;
    rows_to_lanes<T>(p.query, tile, batch, p.dim, 1, panel.tile.query);
    for (int lane = 0; lane < TILE; lane++) {
        const bool has_row = lane < tile.count;
        panel.inner[lane] = panel.total_inner[lane] = panel.visible[lane] = panel.factor[lane] = 0;
        panel.shift[lane] = 0;
        panel.counted[lane] = has_row && (!s.counted || s.counted[batch * p.rows + tile.row[lane]]);
    }
}

// Calls work(panel, block, fetch_next) for the blocks of all panels, one after another, forwards or backwards. Rows are
// read in place if possible, or copied to `memory`. Without `memory` none are read. fetch_next(done, step, all) prefetches
// rows of the next block, those of `step` steps out of `all`.
template <class T, class Work>
static void each_panel_block(const Problem& p, const View& view, int64_t columns, int64_t width, const Task& task,
                       ScorePanel* panels, int64_t count, bool backwards, float* memory, const Work& work) {
    int64_t first = round_up(p.keys, BLOCK), last = 0;
    for (int64_t n = 0; n < count; n++) {
        if (panels[n].start == panels[n].stop) continue;
        first = smaller(first, panels[n].first_block());
        last = larger(last, (panels[n].stop - 1) / BLOCK * BLOCK);
    }
    const int64_t step = backwards ? -BLOCK : BLOCK;
    for (int64_t block = backwards ? last : first; first <= block && block <= last; block += step) {
        const int64_t end = smaller(block + BLOCK, p.keys), padded = round_up(end - block, OCTET), next = block + step;
        const T* source = view.at<T>(task.batch, task.kv_head, block);
        const bool dense = view.row == width && columns == width && end - block == padded;
        const bool in_place = std::is_same<T, float>::value && dense;
        const float* rows = in_place ? reinterpret_cast<const float*>(source) : memory;
        if (memory && !in_place) widen_rows(source, view.row, end - block, columns, memory, width, padded);
        const bool fetches = memory && first <= next && next <= last;
        for (int64_t n = 0; n < count; n++) {
            const int64_t start = larger(block, panels[n].start), stop = smaller(block + padded, panels[n].stop);
            if (start >= stop) continue;
            const int64_t next_rows = fetches ? smaller(BLOCK, p.keys - next) : 0, skipped = next_rows * n / count;
            const int64_t fetched = next_rows * (n + 1) / count - skipped;
            const T* from = source + (step + skipped) * view.row;
            const auto fetch_next = [&](int64_t done, int64_t some, int64_t all) {
                constexpr int64_t LINE = 64 / sizeof(T);
                for (int64_t j = done * fetched / all; j < (done + some) * fetched / all; j++)
                    for (int64_t d = 0; d < columns; d += LINE) __builtin_prefetch(from + j * view.row + d, 0, 2);
            };
            work(panels[n], KeyBlock{start, stop, block, memory ? rows + (start - block) * width : nullptr}, fetch_next);
        }
    }
}

// All statistics of some panels. The second loop over the keys goes backwards, because the last keys are in the cache.
template <class T>
static void work_through(const Problem& p, const Statistics& s, const Task& task, ScorePanel* panels, int64_t count,
                         const TaskSums& sums, float* block_rows, float* mask_memory, const ExactScores& exact) {
    const int64_t b = task.batch, width = width_of_output(p), run = run_length(keys_of_panel(p) / BLOCK);
    const auto score = [&](ScorePanel& panel, const KeyBlock& block, const auto& fetch_next) {
        by_vectors(panel.tile.vectors, [&](auto v) {
            const float unit = s.exact ? 1.f : LOG2E;
            const TileMask mask = tile_mask<v.value>(p, panel.tile, b, block.start, block.stop, mask_memory, unit);
            panel.visible_blocks[panel.number(block.first)] = mask.form != MaskForm::nothing;
            if (mask.form == MaskForm::nothing) return;
            if (s.exact) score_exactly<v.value>(p, panel, block, mask, exact);
            else score_block<v.value>(p, panel, block, mask, fetch_next);
            float* viewers = sums.viewers ? sums.viewers + block.start : nullptr;
            by_form(mask, [&](auto form) { count_visible<v.value, form()>(panel, block.count(), mask, viewers); });
        });
    };
    const auto weigh = [&](ScorePanel& panel, const KeyBlock& block, const auto& fetch_next) {
        if (!panel.visible_blocks[panel.number(block.first)]) return;
        if (panel.tile.summed++ == run) end_panel_run(panel);
        by_vectors(panel.tile.vectors, [&](auto v) {
            weigh_block<v.value>(panel, block);
            if (s.mass_count) add_masses<v.value>(p, s, panel, block, b);
            if (width) mix_block<v.value>(panel, block, fetch_next, width);
        });
    };
    if (s.exact) widen_query(p, panels[0], exact);
    each_panel_block<T>(p, p.key, p.dim, p.dim, task, panels, count, false, block_rows, score);
    if (s.exact) by_vectors(panels[0].tile.vectors, [&](auto v) { store_shifted<v.value>(panels[0], exact); });
    for (int64_t n = 0; s.stripes && n < count; n++) find_stripes(p, s, panels[n], b);
    for (int64_t n = 0; s.top && n < count; n++) expect_largest(panels[n]);
    each_panel_block<T>(p, p.value, p.value_dim, width, task, panels, count, true, width ? block_rows : nullptr, weigh);
    for (int64_t n = 0; n < count; n++) {
        add_total(panels[n].tile);
        for (int lane = 0; lane < TILE; lane++) panels[n].inner[lane] += panels[n].total_inner[lane];
        finish_rows(p, s, panels[n], b);
        if (s.top) write_largest(p, s, panels[n], b);
        if (width) write_output<T>(p, s, panels[n], b);
        if (s.sink) write_sink(p, s, panels[n], b);
        if (s.stripes) write_stripes(p, s, panels[n], b);
        if (s.mass_count) write_masses(p, s, panels[n], b);
        if (s.weights.data) write_weights(p, s, panels[n], b);
        by_vectors(panels[n].tile.vectors, [&](auto v) {
            if (sums.map) pool<v.value>(p, s, panels[n], sums);
            if (s.distance) write_distance<v.value>(p, s, panels[n], b);
        });
    }
    if (sums.received) receive(p, panels, count, sums);
}

template <class T>
static void statistics(const Problem& p, const Statistics& s, const Task& task, const TaskSums& sums, float* scratch) {
    const int64_t together = panels_together(p, s);
    float* block_rows = take(scratch, (BLOCK + OCTET) * larger(p.dim, width_of_output(p)));
    float* mask_memory = take(scratch, MASK_SCRATCH_FLOATS);
    const ExactScores exact = s.exact ? exact_scores(p, keys_of_panel(p), scratch) : ExactScores();
    for (int64_t row = task.row_start; row < task.row_stop;) {
        ScorePanel panels[MOST_TILES];
        float* memory = scratch;
        int64_t count = 0;
        for (; count < together && row < task.row_stop; count++, row += TILE)
            open_panel<T>(p, s, task, row, memory, panels[count]);
        work_through<T>(p, s, task, panels, count, sums, block_rows, mask_memory, exact);
    }
}

}  // namespace clearhead::ISA

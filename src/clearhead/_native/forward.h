// The forward pass. For each block of keys and each tile of rows it computes scores, online softmax and outputs.
#pragma once
#include "tile_masks.h"

namespace clearhead::ISA {

// A tile with sums over a run of keys, rows in the lanes.
struct SummedTile : Tile {
    float *sums, *total;  // of this run, and of earlier runs or null
    int64_t floats;       // of these sums
    int64_t summed;       // keys or blocks of this run
};

// A tile with its outputs (Dv × V·LANES).
struct ForwardTile : SummedTile {
    float* query;  // (D × V·LANES), or their pairs
    float row_max[TILE], sum[TILE];
    float total_max[TILE], total_sum[TILE];
};

INLINE float* take(float*& scratch, int64_t count) {
    float* result = scratch;
    scratch += round_up(count, 16);
    return result;
}

INLINE void clear(float* to, int64_t floats) { memset(to, 0, static_cast<size_t>(floats) * sizeof(float)); }

// Sums of zero of `height` columns, with a total if there are several runs.
static void begin_sums(SummedTile& tile, int64_t height, bool totals, float*& scratch) {
    tile.floats = height * tile.vectors * LANES, tile.summed = 0;
    tile.sums = take(scratch, tile.floats), tile.total = totals ? take(scratch, tile.floats) : nullptr;
    clear(tile.sums, tile.floats);
    if (totals) clear(tile.total, tile.floats);
}

static void begin_outputs(ForwardTile& tile, int64_t height, bool totals, float*& scratch) {
    begin_sums(tile, height, totals, scratch);
    for (int lane = 0; lane < TILE; lane++) {
        tile.row_max[lane] = tile.total_max[lane] = LOWEST;
        tile.sum[lane] = tile.total_sum[lane] = 0;
    }
}

// Adds the total, rescaled to the row maxima of this run, to the sums of the run.
static void add_total(ForwardTile& tile) {
    if (!tile.total) return;
    const int64_t lanes = tile.vectors * LANES;
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        const Floats rescale = exp2(load(tile.total_max + lane) - load(tile.row_max + lane));
        store(tile.sum + lane, load(tile.sum + lane) + load(tile.total_sum + lane) * rescale);
        for (int64_t place = lane; place < tile.floats; place += lanes)
            store(tile.sums + place, load(tile.sums + place) + load(tile.total + place) * rescale);
    }
}

// Adds the sums of a run to the total, and begins the next.
static void end_run(ForwardTile& tile) {
    add_total(tile);
    std::swap(tile.sums, tile.total);
    clear(tile.sums, tile.floats);
    memcpy(tile.total_max, tile.row_max, sizeof tile.row_max);
    memcpy(tile.total_sum, tile.sum, sizeof tile.sum);
    memset(tile.sum, 0, sizeof tile.sum);
    tile.summed = 0;
}

// Whether sums over the keys have several runs.
INLINE bool has_totals(const Problem& p) { return p.keys > RUN * BLOCK; }

// The unit of the largest products before soft-cap and bias, which saves a multiplication per score.
INLINE double unit_of_raw(const Problem& p) { return p.softcap != 0 ? static_cast<double>(p.softcap) : LN_OF_2; }

// Writes scores in units of log 2 to `to`, and updates the row maxima. RAW also updates the maxima of the products of
// visible keys, in `unit_of_raw`.
template <int V, MaskForm FORM, bool CAPPED, bool RAW, class Between>
INLINE void score(const Problem& p, const ForwardTile& tile, const float* keys, int64_t count, const TileMask& mask,
                  const Between& between, float* to, Floats (&row_maxima)[V], [[maybe_unused]] Floats* raw_maxima) {
    const float factor = CAPPED ? p.scale / p.softcap : p.scale * LOG2E;
    const auto write = [&](int64_t j, int v, Floats sum) __attribute__((always_inline)) {
        Floats x = rounded(sum * factor);
        [[maybe_unused]] const Floats raw = x;
        if (CAPPED) x = tanh(x) * (p.softcap * LOG2E);
        x = masked<FORM, V>(x, mask, j, v);
        row_maxima[v] = larger(x, row_maxima[v]);
        if (RAW) raw_maxima[v] = larger(x > splat(-INFINITY) ? raw : x, raw_maxima[v]);
        store(to + (j * V + v) * LANES, x);
    };
    product<true, V>(keys, p.dim, tile.query, V * LANES, p.dim, count, between, write);
}

template <int V, bool RAW = false, class Between>
static void score_any(const Problem& p, const ForwardTile& tile, const float* keys, int64_t count, const TileMask& mask,
                      const Between& between, float* to, Floats (&row_maxima)[V], Floats* raw_maxima = nullptr) {
    by_form(mask, [&](auto form) {
        if (p.softcap != 0)
            return score<V, form(), true, RAW>(p, tile, keys, count, mask, between, to, row_maxima, raw_maxima);
        return score<V, form(), false, RAW>(p, tile, keys, count, mask, between, to, row_maxima, raw_maxima);
    });
}

INLINE Floats sum_of_octet(const Floats (&x)[OCTET]) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Turns scores into weights in place, relative to the new row maxima, and sums them.
template <int V>
INLINE void exponentiate(const Problem& p, const Tile& tile, int64_t batch, int64_t key, int64_t count, float* weights,
                         const Floats (&row_maxima)[V], Floats (&sums)[V]) {
    for (int v = 0; v < V; v++) sums[v] = Floats{};
    for (int64_t j = 0; j < count; j += OCTET) {
        UNROLL for (int v = 0; v < V; v++) {
            Floats x[OCTET];
            UNROLL for (int t = 0; t < OCTET; t++) x[t] = exp2(load(weights + ((j + t) * V + v) * LANES) - row_maxima[v]);
            sums[v] += sum_of_octet(x);
            if (p.drop_below) {
                Ints undropped[OCTET];
                dropout_mask(p, tile, batch, v, key + j, undropped);
                for (int t = 0; t < OCTET; t++) x[t] = only_where(undropped[t], x[t]);
            }
            UNROLL for (int t = 0; t < OCTET; t++) store(weights + ((j + t) * V + v) * LANES, x[t]);
        }
    }
}

// One tile against the keys [start, stop) of a block. `keys` and `values` begin at `start`.
template <int V, class Between>
static void attend(const Problem& p, ForwardTile& tile, int64_t batch, int64_t start, int64_t stop, const float* keys,
                   const float* values, float* weights, float* mask_memory, const Between& between) {
    const TileMask mask = tile_mask<V>(p, tile, batch, start, stop, mask_memory);
    if (mask.form == MaskForm::nothing) return;
    const int64_t count = stop - start, width = round_up(p.value_dim, STEP);
    Floats before[V], row_maxima[V], sums[V], rescale[V];
    for (int v = 0; v < V; v++) before[v] = row_maxima[v] = load(tile.row_max + v * LANES);
    score_any<V>(p, tile, keys, count, mask, between, weights, row_maxima);
    exponentiate<V>(p, tile, batch, start, count, weights, row_maxima, sums);
    for (int v = 0; v < V; v++) {
        rescale[v] = exp2(before[v] - row_maxima[v]);
        store(tile.row_max + v * LANES, row_maxima[v]);
        store(tile.sum + v * LANES, load(tile.sum + v * LANES) * rescale[v] + sums[v]);
    }
    const auto rescale_and_add = [&](int64_t d, int v, Floats sum) __attribute__((always_inline)) {
        float* place = tile.sums + (d * V + v) * LANES;
        store(place, load(place) * rescale[v] + sum);
    };
    product<false, V>(values, width, weights, V * LANES, count, width, fetch_nothing, rescale_and_add);
}

// Writes the lse of a row, and returns the factor of its output, from row maximum (in units of log 2) and sum.
INLINE float finish_row(const Problem& p, int64_t batch, int64_t head, int64_t row, float row_max, float sum) {
    float factor = sum == 0 ? 0 : p.kept_factor / sum;
    if (!p.lse && !p.sinks) return factor;
    const double without = sum == 0 ? -INFINITY : row_max == LOWEST ? LOWEST : row_max * LN_OF_2 + log(sum);
    double lse = without;
    if (p.sinks) {
        const double sink = p.sink(batch, head, row), top = without > sink ? without : sink;
        lse = top + log(exp(without - top) + exp(sink - top));
        factor *= static_cast<float>(exp(without - lse));
    }
    if (p.lse) p.lse[p.row_place(batch, head, row)] = lse;
    return factor;
}

template <class T>
static void finish(const Problem& p, ForwardTile& tile, int64_t batch) {
    float factors[TILE];
    add_total(tile);
    for (int64_t lane = 0; lane < tile.count; lane++)
        factors[lane] = finish_row(p, batch, tile.head[lane], tile.row[lane], tile.row_max[lane], tile.sum[lane]);
    if (p.wide_output) return lanes_to_rows<float>(tile.sums, tile, batch, p.value_dim, factors, p.output);
    lanes_to_rows<T>(tile.sums, tile, batch, p.value_dim, factors, p.output);
}

[[maybe_unused]] static int64_t forward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t width = round_up(p.value_dim, STEP), rows = round_up(task_rows, TILE);
    const int64_t of_rows = rows * (p.dim + width + (has_totals(p) ? width : 0));
    return (BLOCK + OCTET) * (p.dim + width) + of_rows + BLOCK * TILE + MASK_SCRATCH_FLOATS + 6 * 16;
}

// Describes and prepares the tiles of the rows [start, stop) of a task. Returns their number.
template <class SomeTile, class Prepare>
INLINE int64_t describe_tiles(const Problem& p, const Task& task, int64_t start, int64_t stop, SomeTile* tiles,
                              const Prepare& prepare) {
    int64_t count = 0;
    for (; start < stop; start += TILE, count++) {
        Tile& tile = tiles[count];
        describe_rows(p, task.batch, task.kv_head, start, stop, tile);
        if (task.masks) tile.masks = task.masks + (start - task.row_start) / TILE * masks_size(p);
        prepare(tiles[count]);
    }
    return count;
}

// Calls attend(number of vectors of rows, tile, start, stop, keys and values from `start` on, a function that prefetches
// masks between steps) for all blocks of visible keys and each tile, and end_run(tile) after each run of blocks. A block's
// keys and values become rows of floats.
template <class T, class SomeTile, class Attend>
INLINE void each_block(const Problem& p, const Task& task, SomeTile* tiles, int64_t count, const View& keys,
                       const View& values, const Attend& attend) {
    const int64_t b = task.batch, h = task.kv_head;
    const auto [key_start, key_stop] = visible_keys(p, tiles, count);
    const int64_t first = key_start / BLOCK * BLOCK, run = run_length((key_stop - first) / BLOCK) * BLOCK;
    for (int64_t block = first; block < key_stop; block += BLOCK) {
        for (int64_t n = 0; n < count && block > first && (block - first) % run == 0; n++) end_run(tiles[n]);
        if (are_packed_hidden(p, tiles, count, block)) continue;
        const int64_t rows = smaller(BLOCK, p.keys - block), padded = round_up(rows, OCTET);
        widen_rows(p.key.at<T>(b, h, block), p.key.row, rows, p.dim, keys.at<float>(0, 0, 0), keys.row, padded);
        widen_rows(p.value.at<T>(b, h, block), p.value.row, rows, p.value_dim, values.at<float>(0, 0, 0), values.row, padded);
        for (int64_t n = 0; n < count; n++) {
            fetch_slice<T>(p, b, h, block + BLOCK, n, count);
            int64_t start = block, stop = block + padded;
            trim(tiles[n], start, stop);
            if (start >= stop) continue;
            const bool last = n + 1 == count;
            const auto between = fetch_masks(p, tiles[last ? 0 : n + 1], b, last ? block + BLOCK : block);
            const float *k = keys.at<float>(0, 0, start - block), *v = values.at<float>(0, 0, start - block);
            by_vectors(tiles[n].vectors, [&](auto vectors) { attend(vectors, tiles[n], start, stop, k, v, between); });
        }
    }
}

template <class T>
static void forward(const Problem& p, const Task& task, float* scratch) {
    const int64_t width = round_up(p.value_dim, STEP), b = task.batch;
    const View keys = {take(scratch, BLOCK * p.dim), 0, 0, p.dim}, values = {take(scratch, BLOCK * width), 0, 0, width};
    float *weights = take(scratch, BLOCK * TILE), *mask_memory = take(scratch, MASK_SCRATCH_FLOATS);
    ForwardTile tiles[MOST_TILES];
    const int64_t count = describe_tiles(p, task, task.row_start, task.row_stop, tiles, [&](ForwardTile& tile) {
        tile.query = take(scratch, p.dim * tile.vectors * LANES);
        rows_to_lanes<T>(p.query, tile, b, p.dim, 1, tile.query);
        begin_outputs(tile, width, has_totals(p), scratch);
    });
    each_block<T>(p, task, tiles, count, keys, values,
                  [&](auto vectors, ForwardTile& tile, int64_t start, int64_t stop, const float* k, const float* v,
                      const auto& between) {
                      attend<vectors.value>(p, tile, b, start, stop, k, v, weights, mask_memory, between);
                  });
    for (int64_t n = 0; n < count; n++) finish<T>(p, tiles[n], b);
}

}  // namespace clearhead::ISA

// The backward pass: weights are computed again from the log-sum-exp, and with dO the output's gradient, dp = dO vᵀ
// (dropped as p was), δ = Σ_j p dp = dO·o and dl that of lse: ds = p (dp − δ + dl). Sums over queries (dk, dv) are kept
// for the whole length of the keys, sums over keys (dq) for a few tiles of rows at a time.
//
// Where one weight is nearly 1, dp − δ of its key is the difference of two nearly equal numbers, and their rounding would
// be all there is of ds. But the sum of ds over the keys is known: 0 without sinks and dl. In float32, ds of a key whose
// weight is above one half (the heavy key of its row) is therefore that sum less ds of the other keys, added at the end.
#pragma once
#include "backward_tile.h"
#include "decode.h"

namespace clearhead::ISA {

// Working memory of one task.
struct BackwardRoom {
    float *keys, *values, *weights, *gradients, *slopes;
    MaskScratch masks;
};

// to (count × V·LANES) = left (count × columns) · right (columns × V·LANES); calls between(step) before each step
template <int V, class Between>
static void product(const float* left, int64_t stride, int64_t columns, const float* right, int64_t count, float* to,
                    const Between& between) {
    for (int64_t j = 0; j < count; j += STEP) {
        between(j / STEP);
        Floats acc[STEP][V] = {};
        multiply<true>(acc, left + j * stride, stride, right, V * LANES, columns);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) store(to + ((j + t) * V + v) * LANES, acc[t][v]);
    }
}

// to (keys × columns) += left (keys × rows) · right (rows × columns), V vectors of columns
template <int V>
static void add_columns(const float* left, int64_t rows, const float* right, int64_t stride, int64_t keys, float* to) {
    for (int64_t j = 0; j < keys; j += STEP) {
        Floats acc[STEP][V] = {};
        multiply<true>(acc, left + j * rows, rows, right, stride, rows);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* place = to + (j + t) * stride + v * LANES;
                store(place, load(place) + acc[t][v]);
            }
    }
}

static void add_products(const float* left, int64_t rows, const float* right, int64_t stride, int64_t keys, float* to) {
    for (int64_t d = 0; d < stride;) {
        const int64_t left_over = (stride - d) / LANES;
        if (left_over >= 3 && left_over != 4) {
            add_columns<3>(left, rows, right + d, stride, keys, to + d);
            d += 3 * LANES;
        } else if (left_over >= 2) {
            add_columns<2>(left, rows, right + d, stride, keys, to + d);
            d += 2 * LANES;
        } else {
            add_columns<1>(left, rows, right + d, stride, keys, to + d);
            d += LANES;
        }
    }
}

// Scores to weights in place; with a soft-cap its slope goes into `slopes`.
template <int V, MaskForm FORM>
static void recompute_probs(const Problem& p, const float* lse, int64_t count, const TileMask& mask, float* weights,
                        float* slopes) {
    const float factor = p.softcap != 0 ? p.scale / p.softcap : p.scale * LOG2E;
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const int64_t place = (j * V + v) * LANES;
            Floats x = rounded(load(weights + place) * factor);
            if (p.softcap != 0) {
                x = tanh(x);
                store(slopes + place, 1.f - x * x);
                x *= p.softcap * LOG2E;
            }
            x = masked<FORM, V>(x, mask, j, v);
            store(weights + place, exp2(x - load(lse + v * LANES)));
        }
}

// dp to ds, before the soft-cap, in place; the weights become the dropped ones. With HEAVY, ds of a heavy key is left out.
template <int V, bool HEAVY>
static void differentiate(const Problem& p, BackwardTile& tile, int64_t batch, int64_t key, int64_t count,
                          float* weights, float* gradients) {
    [[maybe_unused]] Floats light_sum[V] = {};
    for (int64_t j = 0; j < count; j += GROUP)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Ints kept[GROUP];
            if (p.drop_below) dropout_mask(p, tile.rows, batch, v, key + j, kept);
            const Floats correction = load(tile.correction + v * LANES);
            [[maybe_unused]] const Floats above = load(tile.heavy_above + v * LANES);
            [[maybe_unused]] Ints heavy_key = load(tile.heavy_key + v * LANES);
            Floats ds[GROUP];
#pragma GCC unroll 8
            for (int t = 0; t < GROUP; t++) {
                const int64_t place = ((j + t) * V + v) * LANES;
                const Floats weight = load(weights + place);
                Floats x = load(gradients + place);
                if (p.drop_below) {
                    x = only_where(kept[t], x);
                    store(weights + place, only_where(kept[t], weight));
                }
                ds[t] = weight * (x - correction);
                if (HEAVY) {
                    const Ints heavy = weight > above;
                    ds[t] = heavy ? Floats{} : ds[t];
                    heavy_key = heavy ? splat(static_cast<int32_t>(key + j + t)) : heavy_key;
                }
                store(gradients + place, ds[t]);
            }
            if (HEAVY) {
                light_sum[v] += sum_of_group(ds);
                store(tile.heavy_key + v * LANES, heavy_key);
            }
        }
    for (int lane = 0; HEAVY && lane < V * LANES; lane++) tile.light_sum[lane] += light_sum[lane / LANES][lane % LANES];
}

// The slopes of the soft-cap at the heavy keys among [start, stop).
static void keep_heavy_slopes(BackwardTile& tile, int64_t start, int64_t stop, const float* slopes) {
    for (int64_t lane = 0; lane < tile.rows.count; lane++) {
        const int64_t key = tile.heavy_key[lane];
        if (start <= key && key < stop)
            tile.heavy_slope[lane] = slopes[(key - start) * tile.rows.vectors * LANES + lane];
    }
}

// ds, which is what a bias has for a gradient, from the lanes back into its rows.
template <int V>
static void add_to_bias_gradient(const Problem& p, const Rows& rows, int64_t batch, int64_t start, int64_t stop,
                                 const float* gradients, const float* factors) {
    stop = smaller(stop, p.keys);
    for (int v = 0; v < V; v++)
        for (int64_t j = start; j < stop; j += LANES) {
            const int64_t count = smaller(LANES, stop - j);
            Floats square[LANES];
            for (int64_t r = 0; r < LANES; r++)
                square[r] = r < count ? load(gradients + ((j - start + r) * V + v) * LANES) : Floats{};
            transpose(square);
            for (int64_t lane = v * LANES; lane < smaller(rows.count, (v + 1) * LANES); lane++) {
                float* to = p.bias_gradient.at<float>(batch, rows.head[lane], rows.row[lane]) + j;
                store_some(to, load_some(to, count) + square[lane - v * LANES] * factors[lane], count);
            }
        }
}

// The same products with the queries in the order in which decoding has summed them: where scores are large, weights
// from scores that are rounded in another way would not sum to 1.
template <int V>
static void score_few(const Problem& p, const BackwardTile& tile, const float* keys, int64_t count, float* to) {
    const int64_t width = lanes_up(p.dim), stride = step_up(p.dim);
    memset(to, 0, static_cast<size_t>(count * V * LANES) * sizeof(float));
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t r = 0; r < tile.rows.count; r += TOGETHER) {  // which may take in rows of zeros
            const int64_t there = smaller(LANES, count - j);
            Floats dot[TOGETHER];
            dots(tile.few_queries + r * width, width, keys + j * stride, stride, p.dim, there, dot);
            for (int64_t k = 0; k < there; k++)
                for (int n = 0; n < TOGETHER; n++) to[(j + k) * V * LANES + r + n] = dot[n][k];
        }
}

// One tile against the keys [start, stop), whose sums of dk and dv are given.
template <int V, bool HEAVY>
static void attend_back(const Problem& p, BackwardTile& tile, int64_t batch, int64_t start, int64_t stop,
                        const BackwardRoom& room, const NextMasks& next, const float* keys, const float* values,
                        float* key_sums, float* value_sums) {
    const TileMask mask = tile_mask<V>(p, tile.rows, batch, start, stop, room.masks);
    if (mask.coverage == Coverage::nothing) return;
    const int64_t count = stop - start, key_stride = step_up(p.dim), rows = V * LANES;
    if (p.few)
        score_few<V>(p, tile, keys, count, room.weights);
    else
        product<V>(keys, key_stride, p.dim, tile.query_lanes, count, room.weights, [&](int64_t step) {
            if (next.start < next.stop) next.fetch(p, step, count / STEP);
        });
    by_form(mask, [&](auto form) { recompute_probs<V, form()>(p, tile.lse, count, mask, room.weights, room.slopes); });
    product<V>(values, p.value_dim, p.value_dim, tile.gradient_lanes, count, room.gradients, [](int64_t) {});
    differentiate<V, HEAVY>(p, tile, batch, start, count, room.weights, room.gradients);
    if (HEAVY && p.softcap != 0) keep_heavy_slopes(tile, start, stop, room.slopes);
    if (p.bias_gradient.data) add_to_bias_gradient<V>(p, tile.rows, batch, start, stop, room.gradients, tile.missing);
    if (p.softcap != 0)
        for (int64_t place = 0; place < count * rows; place += LANES)
            store(room.gradients + place, load(room.gradients + place) * load(room.slopes + place));
    add_products(room.weights, rows, tile.gradient_rows, lanes_up(p.value_dim), count, value_sums);
    add_products(room.gradients, rows, tile.query_rows, lanes_up(p.dim), count, key_sums);
    for (int64_t d = 0; d < p.dim; d += STEP) {
        Floats acc[STEP][V] = {};
        float* sums = tile.query_sums + d * rows;
        multiply<false>(acc, keys + d, key_stride, room.gradients, rows, count);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* place = sums + (t * V + v) * LANES;
                store(place, load(place) + acc[t][v]);
            }
    }
}

static int64_t tiles_at_once(const Problem& p) { return p.dim + p.value_dim > 256 ? 4 : 8; }

[[maybe_unused]] static int64_t backward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t tiles = smaller(tiles_at_once(p), (task_rows + TILE - 1) / TILE);
    return BLOCK * (step_up(p.dim) + p.value_dim) + 3 * BLOCK * TILE + MASK_SCRATCH_FLOATS + tiles * tile_floats(p) + 6 * 16;
}

// A few tiles of rows against all the keys they see.
template <class T>
static void backward_rows(const Problem& p, const Task& task, int64_t row_start, int64_t row_stop,
                          const BackwardRoom& room, float* sums, float* scratch) {
    constexpr bool HEAVY = sizeof(T) == sizeof(float);  // in half precision the rounding of the results is larger
    const int64_t b = task.batch;
    BackwardTile tiles[8];
    int64_t count = 0, key_start = p.keys, key_stop = 0;
    for (int64_t start = row_start; start < row_stop; start += TILE, count++) {
        describe_rows(p, b, task.kv_head, start, row_stop, tiles[count].rows);
        if (task.masks) tiles[count].rows.masks = task.masks + (start - task.row_start) / TILE * masks_size(p);
        prepare<T>(p, b, tiles[count], scratch);
        key_start = smaller(key_start, tiles[count].rows.lowest_first);
        key_stop = larger(key_stop, tiles[count].rows.highest_last);
    }
    const int64_t key_stride = step_up(p.dim), key_width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    float* value_sums = sums + keys_summed(p) * key_width;
    const int64_t first = key_start / BLOCK * BLOCK, run = run_length((key_stop - first) / BLOCK) * BLOCK;
    for (int64_t block = first; block < key_stop; block += BLOCK) {
        for (int64_t n = 0; n < count && block > first && (block - first) % run == 0; n++)
            end_query_run(tiles[n], step_up(p.dim) * tiles[n].rows.vectors * LANES);
        const int64_t end = smaller(block + BLOCK, p.keys), padded = round_up(end - block, GROUP);
        widen_rows(p.key.at<T>(b, task.kv_head, block), p.key.row, end - block, p.dim, room.keys, key_stride, padded);
        widen_rows(p.value.at<T>(b, task.kv_head, block), p.value.row, end - block, p.value_dim, room.values,
                   p.value_dim, padded);
        for (int64_t n = 0; n < count; n++) {
            fetch_part<T>(p, b, task.kv_head, block + BLOCK, n, count);
            int64_t start = block, stop = block + padded;
            trim(tiles[n].rows, start, stop);
            if (start >= stop) continue;
            const bool last = n + 1 == count;
            const NextMasks next = next_masks(p, tiles[last ? 0 : n + 1].rows, b, last ? block + BLOCK : block);
            const float *k = room.keys + (start - block) * key_stride, *v = room.values + (start - block) * p.value_dim;
            float *dk = sums + start * key_width, *dv = value_sums + start * value_width;
            by_vectors(tiles[n].rows.vectors, [&](auto vectors) {
                attend_back<vectors.value, HEAVY>(p, tiles[n], b, start, stop, room, next, k, v, dk, dv);
            });
        }
    }
    for (int64_t n = 0; n < count; n++) {
        float factors[TILE];
        for (int lane = 0; lane < TILE; lane++) factors[lane] = p.scale * tiles[n].missing[lane];
        write_query_gradient<T>(p, b, tiles[n], step_up(p.dim), factors);
        if (HEAVY) add_heavy_keys(p, tiles[n], b, task.kv_head, sums);
    }
}

template <class T>
static void backward_typed(const Problem& p, const Task& task, float* sums, float* scratch) {
    BackwardRoom room;
    room.keys = take(scratch, BLOCK * step_up(p.dim));
    room.values = take(scratch, BLOCK * p.value_dim);
    room.weights = take(scratch, BLOCK * TILE);
    room.gradients = take(scratch, BLOCK * TILE);
    room.masks = mask_scratch(take(scratch, MASK_SCRATCH_FLOATS));
    room.slopes = take(scratch, BLOCK * TILE);
    const int64_t step = tiles_at_once(p) * TILE;
    for (int64_t start = task.row_start; start < task.row_stop; start += step)
        backward_rows<T>(p, task, start, smaller(start + step, task.row_stop), room, sums, scratch);
}

}  // namespace clearhead::ISA

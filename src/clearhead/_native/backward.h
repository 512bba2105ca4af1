// The backward pass, which recomputes the weights from the log-sum-exp:
//
//     dp = dO vᵀ (dropped as p was),   δ = Σ_j p dp = dO·o,   ds = p (dp − δ + dl)
//
// dO is the output's gradient and dl is that of lse. Sums over queries (dk, dv) cover all keys. Sums over keys (dq) cover
// a few tiles of rows.
//
// A key with a weight above one half is the heavy key of its row. If its weight is nearly 1, dp − δ is a difference of
// nearly equal numbers, and ds would be mostly rounding. But Σ_j ds is known: it is 0 without sinks and dl. So in float32,
// ds of the heavy key is this sum less ds of the other keys, and is added at the end.
#pragma once
#include "backward_tile.h"
#include "decode.h"

namespace clearhead::ISA {

// Working memory of one task.
struct BackwardBuffers {
    View keys, values;
    float *weights, *gradients, *slopes, *masks;
};

// to (count × V·LANES) = left (count × columns) · right (columns × V·LANES)
template <int V, class Between>
static void multiply_tile(const float* left, int64_t stride, int64_t columns, const float* right, int64_t count, float* to,
                          const Between& between) {
    const auto write = [&](int64_t j, int v, Floats sum) __attribute__((always_inline)) {
        store(to + (j * V + v) * LANES, sum);
    };
    product<true, V>(left, stride, right, V * LANES, columns, count, between, write);
}

// to (keys × columns) += left (keys × rows) · right (rows × columns)
static void add_products(const float* left, int64_t rows, const float* right, int64_t stride, int64_t keys, float* to) {
    for (int64_t d = 0, vectors; d < stride; d += vectors * LANES) {
        vectors = columns_at_once((stride - d) / LANES);
        by_vectors(vectors, [&](auto v) {
            product<true, v.value>(left, rows, right + d, stride, rows, keys, fetch_nothing, add_to(to + d, stride));
        });
    }
}

// Turns scores into weights in place, and writes the slope of a soft-cap to `slopes`.
template <int V, MaskForm FORM>
static void recompute_probs(const Problem& p, const float* lse, int64_t count, const TileMask& mask, float* weights,
                        float* slopes) {
    const float factor = p.softcap != 0 ? p.scale / p.softcap : p.scale * LOG2E;
    for (int64_t j = 0; j < count; j++)
        UNROLL for (int v = 0; v < V; v++) {
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

// Turns dp into ds, before the soft-cap, and drops weights, in place. With HEAVY, ds of a heavy key is 0.
template <int V, bool HEAVY>
static void differentiate(const Problem& p, BackwardTile& tile, int64_t batch, int64_t key, int64_t count,
                          float* weights, float* gradients) {
    [[maybe_unused]] Floats light_sum[V] = {};
    for (int64_t j = 0; j < count; j += OCTET)
        UNROLL for (int v = 0; v < V; v++) {
            Ints undropped[OCTET];
            if (p.drop_below) dropout_mask(p, tile, batch, v, key + j, undropped);
            const Floats correction = load(tile.correction + v * LANES);
            [[maybe_unused]] const Floats above = load(tile.heavy_above + v * LANES);
            [[maybe_unused]] Ints heavy_key = load(tile.heavy_key + v * LANES);
            Floats ds[OCTET];
            UNROLL for (int t = 0; t < OCTET; t++) {
                const int64_t place = ((j + t) * V + v) * LANES;
                const Floats weight = load(weights + place);
                Floats x = load(gradients + place);
                if (p.drop_below) {
                    x = only_where(undropped[t], x);
                    store(weights + place, only_where(undropped[t], weight));
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
                light_sum[v] += sum_of_octet(ds);
                store(tile.heavy_key + v * LANES, heavy_key);
            }
        }
    for (int lane = 0; HEAVY && lane < V * LANES; lane++) tile.light_sum[lane] += light_sum[lane / LANES][lane % LANES];
}

// Stores the slopes of the soft-cap at the heavy keys among [start, stop).
static void keep_heavy_slopes(BackwardTile& tile, int64_t start, int64_t stop, const float* slopes) {
    for (int64_t lane = 0; lane < tile.count; lane++) {
        const int64_t key = tile.heavy_key[lane];
        if (start <= key && key < stop)
            tile.heavy_slope[lane] = slopes[(key - start) * tile.vectors * LANES + lane];
    }
}

// Adds ds, the gradient of a bias, from the lanes to its rows.
static void add_to_bias_gradient(const Problem& p, const Tile& tile, int64_t batch, int64_t start, int64_t stop,
                                 const float* gradients, const float* factors) {
    const int64_t columns = smaller(stop, p.keys) - start;
    each_row_vector(gradients, tile, columns, [&](int64_t lane, int64_t j, Floats ds, int64_t count) {
        float* to = p.bias_gradient.at<float>(batch, tile.head[lane], tile.row[lane]) + start + j;
        store_some(to, load_some(to, count) + ds * factors[lane], count);
    });
}

// Products of queries and keys with the summation order of decoding. With another rounding of large scores, weights would
// not sum to 1.
template <int V>
static void score_few(const Problem& p, const BackwardTile& tile, const float* keys, int64_t count, float* to) {
    const int64_t width = lanes_up(p.dim), stride = step_up(p.dim);
    memset(to, 0, static_cast<size_t>(count * V * LANES) * sizeof(float));
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t r = 0; r < tile.count; r += TOGETHER) {  // which may include rows of zeros
            const int64_t present = smaller(LANES, count - j);
            Floats dot[TOGETHER];
            dots(tile.few_queries + r * width, width, Consecutive<float>(keys + j * stride, stride, p.dim), p.dim, present, dot);
            for (int64_t k = 0; k < present; k++)
                for (int n = 0; n < TOGETHER; n++) to[(j + k) * V * LANES + r + n] = dot[n][k];
        }
}

// One tile against the keys [start, stop), with their sums of dk and dv.
template <int V, bool HEAVY, class Between>
static void attend_back(const Problem& p, BackwardTile& tile, int64_t batch, int64_t start, int64_t stop,
                        const BackwardBuffers& buffers, const Between& between, const float* keys, const float* values,
                        float* key_sums, float* value_sums) {
    const TileMask mask = tile_mask<V>(p, tile, batch, start, stop, buffers.masks);
    if (mask.form == MaskForm::nothing) return;
    const int64_t count = stop - start, key_stride = step_up(p.dim), rows = V * LANES;
    if (p.few)
        score_few<V>(p, tile, keys, count, buffers.weights);
    else
        multiply_tile<V>(keys, key_stride, p.dim, tile.query_lanes, count, buffers.weights, between);
    by_form(mask, [&](auto form) { recompute_probs<V, form()>(p, tile.lse, count, mask, buffers.weights, buffers.slopes); });
    multiply_tile<V>(values, p.value_dim, p.value_dim, tile.gradient_lanes, count, buffers.gradients, fetch_nothing);
    differentiate<V, HEAVY>(p, tile, batch, start, count, buffers.weights, buffers.gradients);
    if (HEAVY && p.softcap != 0) keep_heavy_slopes(tile, start, stop, buffers.slopes);
    if (p.bias_gradient.data) add_to_bias_gradient(p, tile, batch, start, stop, buffers.gradients, tile.missing);
    if (p.table_buckets) add_to_table_gradients<V>(p, tile, start, count, buffers.gradients, tile.missing);
    if (p.softcap != 0)
        for (int64_t place = 0; place < count * rows; place += LANES)
            store(buffers.gradients + place, load(buffers.gradients + place) * load(buffers.slopes + place));
    add_products(buffers.weights, rows, tile.gradient_rows, lanes_up(p.value_dim), count, value_sums);
    add_products(buffers.gradients, rows, tile.query_rows, lanes_up(p.dim), count, key_sums);
    product<false, V>(keys, key_stride, buffers.gradients, rows, count, p.dim, fetch_nothing, add_to(tile.sums, rows));
}

static int64_t tiles_at_once(const Problem& p) { return p.dim + p.value_dim > 256 ? 4 : 8; }

[[maybe_unused]] static int64_t backward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t tiles = smaller(tiles_at_once(p), (task_rows + TILE - 1) / TILE);
    return BLOCK * (step_up(p.dim) + p.value_dim) + 3 * BLOCK * TILE + MASK_SCRATCH_FLOATS + tiles * tile_floats(p) + 6 * 16;
}

// A few tiles of rows against all their visible keys.
template <class T>
static void backward_rows(const Problem& p, const Task& task, int64_t row_start, int64_t row_stop,
                          const BackwardBuffers& buffers, float* sums, float* scratch) {
    constexpr bool HEAVY = sizeof(T) == sizeof(float);  // in half precision the rounding of the results is larger
    const int64_t b = task.batch;
    BackwardTile tiles[8];
    const int64_t count = describe_tiles(p, task, row_start, row_stop, tiles,
                                         [&](BackwardTile& tile) { prepare<T>(p, b, tile, scratch); });
    const int64_t key_width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    float* value_sums = sums + keys_summed(p) * key_width;
    each_block<T>(p, task, tiles, count, buffers.keys, buffers.values,
                  [&](auto vectors, BackwardTile& tile, int64_t start, int64_t stop, const float* k, const float* v,
                      const auto& between) {
                      attend_back<vectors.value, HEAVY>(p, tile, b, start, stop, buffers, between, k, v,
                                                        sums + start * key_width, value_sums + start * value_width);
                  });
    for (int64_t n = 0; n < count; n++) {
        float factors[TILE];
        for (int lane = 0; lane < TILE; lane++) factors[lane] = p.scale * tiles[n].missing[lane];
        write_query_gradient<T>(p, b, tiles[n], factors);
        if (HEAVY) add_heavy_keys(p, tiles[n], b, task.kv_head, sums);
    }
}

template <class T>
static void backward(const Problem& p, const Task& task, float* sums, float* scratch) {
    const BackwardBuffers buffers = {{take(scratch, BLOCK * step_up(p.dim)), 0, 0, step_up(p.dim)},
                                     {take(scratch, BLOCK * p.value_dim), 0, 0, p.value_dim},
                                     take(scratch, BLOCK * TILE),
                                     take(scratch, BLOCK * TILE),
                                     take(scratch, BLOCK * TILE),
                                     take(scratch, MASK_SCRATCH_FLOATS)};
    const int64_t step = tiles_at_once(p) * TILE;
    for (int64_t start = task.row_start; start < task.row_stop; start += step)
        backward_rows<T>(p, task, start, smaller(start + step, task.row_stop), buffers, sums, scratch);
}

}  // namespace clearhead::ISA

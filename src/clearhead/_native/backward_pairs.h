// The backward pass of bfloat16 where the processor multiplies pairs of bfloat16; backward.h says what is computed. Scores
// and dp are products of numbers as they came. Weights and ds have sixteen bits each: with eight, gradients that cancel
// each other would be off by more than their own rounding. As pairs (keys × V·LANES rows) they are a left factor for sums
// over queries (dk, dv) and a right one for sums over keys (dq), so that nothing has to be transposed.
//
// While the vector units make weights and ds of one unit, tile registers multiply those of the unit before with dO, q and
// k, and compute scores and dp of the next.
#pragma once
#include "affine.h"
#include "backward.h"
#include "forward_pairs.h"

namespace clearhead::ISA {

constexpr int BACKWARD_BLOCK = 64;          // keys of a unit, packed for all tiles
constexpr int64_t TILES_BYTES = 768 * 1024;  // of tiles at once, which have to stay in the second cache

struct PairBackward {
    static constexpr int BLOCK_KEYS = BACKWARD_BLOCK, CHUNK_KEYS = BACKWARD_BLOCK, SUMS = 3, SCORES = 2;
    typedef DueProducts<SUMS + SCORES> Due;

    const Problem& p;
    const Task& task;
    float* key_sums;  // of dk, then dv
    Pair *copied_keys, *copied_values, *keys_twice[SIDES];  // (keys × pairs of D or Dv); (D × keys)
    float *weights[2], *gradients[2], *slopes;              // (keys × V·LANES); first scores and dp
    float* masks;
    Matrix<const Pair> keys, values;

    bool keeps_numbers() const { return p.softcap != 0 || p.bias_gradient.data; }

    void pack(int64_t start, int64_t present, int64_t padded, int side) {
        keys = find_pairs(p.key, task.batch, task.kv_head, start, present, p.dim, padded, copied_keys);
        values = find_pairs(p.value, task.batch, task.kv_head, start, present, p.value_dim, padded, copied_values);
        transpose_twice(p.key, task.batch, task.kv_head, start, present, p.dim, height_up(p.dim), BACKWARD_BLOCK, padded,
                        keys_twice[side]);
    }

    void scores(const Unit<BackwardTile>& unit, Product* of_next) const {
        const BackwardTile& tile = *unit.tile;
        const int64_t vectors = tile.vectors, lanes = vectors * LANES;
        of_next[0] = {{keys.at(unit.within, 0), keys.stride}, {as_pairs(tile.query_lanes), lanes}, 1, pairs_up(p.dim),
                      unit.count, vectors, {weights[unit.slot], lanes}, false};
        of_next[1] = {{values.at(unit.within, 0), values.stride}, {as_pairs(tile.gradient_lanes), lanes}, 1,
                      pairs_up(p.value_dim), unit.count, vectors, {gradients[unit.slot], lanes}, false};
    }

    template <int V, MaskForm FORM>
    void adjust(const Unit<BackwardTile>& unit) const {
        recompute_probs<V, FORM>(p, unit.tile->lse, unit.count, unit.mask, weights[unit.slot], slopes);
    }

    // Scores and dp to weights and ds in their places, as pairs. If not PLAIN, there may be dropout, scores may be weights
    // already, ds may have to stay a number for now, and weights may miss a factor.
    template <int V, bool PLAIN>
    void differentiate(const Unit<BackwardTile>& unit, Due& due) const {
        const BackwardTile& tile = *unit.tile;
        const bool drop = !PLAIN && p.drop_below, numbers = !PLAIN && keeps_numbers(), weighed = !PLAIN && unit.adjusted;
        const float factor = p.scale * LOG2E;
        float *of_weights = weights[unit.slot], *of_gradients = gradients[unit.slot];
        for (int64_t j = 0; j < unit.count; j += OCTET)
            UNROLL for (int v = 0; v < V; v++) {
                Ints undropped[OCTET];
                if (drop) dropout_mask(p, tile, task.batch, v, unit.start + j, undropped);
                const Floats lse = load(tile.lse + v * LANES), correction = load(tile.correction + v * LANES);
                for (int t = 0; t < OCTET; t++) {
                    if (t % 2 == 0) due.step_of_any();
                    const int64_t place = ((j + t) * V + v) * LANES;
                    Floats weight = load(of_weights + place), x = load(of_gradients + place);
                    if (!weighed) weight = exp2_of_weight(weight * factor - lse);
                    if (!PLAIN) weight *= load(tile.missing + v * LANES);
                    if (drop) x = only_where(undropped[t], x * p.kept_factor);
                    x = weight * (x - correction);
                    if (drop) weight = only_where(undropped[t], weight * p.kept_factor);
                    store(of_weights + place, reinterpret_cast<Floats>(split(weight)));
                    store(of_gradients + place, numbers ? x : reinterpret_cast<Floats>(split(x)));
                }
            }
    }

    // ds that stayed numbers, for the gradient of a bias or the slope of a soft-cap, become pairs.
    template <int V>
    void finish_gradients(const Unit<BackwardTile>& unit) const {
        float* to = gradients[unit.slot];
        if (p.bias_gradient.data) {
            float factors[TILE];  // which the weights had already
            for (float& factor : factors) factor = 1;
            add_to_bias_gradient(p, *unit.tile, task.batch, unit.start, unit.start + unit.count, to, factors);
        }
        for (int64_t place = 0; place < unit.count * V * LANES; place += LANES) {
            Floats x = load(to + place);
            if (p.softcap != 0) x *= load(slopes + place);
            store(to + place, reinterpret_cast<Floats>(split(x)));
        }
    }

    template <int V>
    void weigh(const Unit<BackwardTile>& unit, Due& due) const {
        if (unit.adjusted || keeps_numbers() || p.drop_below || unit.tile->misses)
            differentiate<V, false>(unit, due);
        else
            differentiate<V, true>(unit, due);
        if (keeps_numbers()) finish_gradients<V>(unit);
    }

    void sums(const Unit<BackwardTile>& unit, Product* of_before) const {
        const BackwardTile& tile = *unit.tile;
        const int64_t vectors = tile.vectors, lanes = vectors * LANES;
        const int64_t width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
        const Matrix<const Pair> left_weights = {reinterpret_cast<const Pair*>(weights[unit.slot]), lanes};
        const Matrix<const Pair> left_gradients = {reinterpret_cast<const Pair*>(gradients[unit.slot]), lanes};
        const Matrix<const Pair> transposed = {keys_twice[unit.side] + unit.within, BACKWARD_BLOCK};
        float* value_sums = key_sums + keys_summed(p) * width;
        of_before[0] = {left_weights, {as_pairs(tile.gradient_rows), value_width}, 1, lanes, unit.count,
                        value_width / LANES, {value_sums + unit.start * value_width, value_width}, true};
        of_before[1] = {left_gradients, {as_pairs(tile.query_rows), width}, 1, lanes, unit.count, width / LANES,
                        {key_sums + unit.start * width, width}, true};
        of_before[2] = {transposed, left_gradients, 1, unit.count, height_up(p.dim), vectors, {tile.sums, lanes}, true};
    }
};

static int64_t pair_tile_floats(const Problem& p) {
    const int64_t width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    return TILE * (pairs_up(p.dim) + pairs_up(p.value_dim) + 3 * width + value_width) + 6 * 16;
}

static int64_t pair_tiles_at_once(const Problem& p) {
    return larger(1, smaller(MOST_TILES, TILES_BYTES / 4 / pair_tile_floats(p)));
}

static int64_t pair_backward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t tiles = smaller(pair_tiles_at_once(p), (task_rows + TILE - 1) / TILE);
    const int64_t of_chunk = BACKWARD_BLOCK * (pairs_up(p.dim) + pairs_up(p.value_dim) + SIDES * height_up(p.dim));
    return of_chunk + 5 * BACKWARD_BLOCK * TILE + MASK_SCRATCH_FLOATS + tiles * pair_tile_floats(p) + 16 * (8 + SIDES);
}

static void prepare_pairs(const Problem& p, int64_t batch, BackwardTile& tile, float*& scratch) {
    const int64_t lanes = tile.vectors * LANES;
    tile.query_lanes = take(scratch, pairs_up(p.dim) * lanes);
    tile.gradient_lanes = take(scratch, pairs_up(p.value_dim) * lanes);
    tile.query_rows = take(scratch, lanes_up(p.dim) * lanes);
    tile.gradient_rows = take(scratch, lanes_up(p.value_dim) * lanes);
    rows_to_pairs(p.query, tile, batch, p.dim, pairs_up(p.dim), false, as_pairs(tile.query_lanes));
    rows_to_pairs(p.output_gradient, tile, batch, p.value_dim, pairs_up(p.value_dim), false, as_pairs(tile.gradient_lanes));
    rows_twice(p.query, tile, batch, p.dim, as_pairs(tile.query_rows));
    rows_twice(p.output_gradient, tile, batch, p.value_dim, as_pairs(tile.gradient_rows));
    begin_sums(tile, height_up(p.dim), p.keys > PAIR_RUN, scratch);
    correct<BFloat16>(p, batch, tile);
    tile.misses = false;
    for (const float factor : tile.missing) tile.misses = tile.misses || fabsf(factor - 1) > 0x1p-13f;
}

template <>
void backward<BFloat16>(const Problem& p, const Task& task, float* sums, float* scratch) {
    PairBackward pass = {p, task, sums};
    pass.copied_keys = take_pairs(scratch, BACKWARD_BLOCK * pairs_up(p.dim));
    pass.copied_values = take_pairs(scratch, BACKWARD_BLOCK * pairs_up(p.value_dim));
    for (Pair*& keys : pass.keys_twice) keys = take_pairs(scratch, height_up(p.dim) * BACKWARD_BLOCK);
    for (float*& weights : pass.weights) weights = take(scratch, BACKWARD_BLOCK * TILE);
    for (float*& gradients : pass.gradients) gradients = take(scratch, BACKWARD_BLOCK * TILE);
    pass.slopes = take(scratch, BACKWARD_BLOCK * TILE);
    pass.masks = take(scratch, MASK_SCRATCH_FLOATS);
    const TileRegisters registers;
    const int64_t step = pair_tiles_at_once(p) * TILE;
    for (int64_t row = task.row_start; row < task.row_stop; row += step) {
        BackwardTile tiles[MOST_TILES];
        float *memory = scratch, factors[TILE];
        const int64_t stop = smaller(row + step, task.row_stop);
        const int64_t count = describe_tiles(
            p, task, row, stop, tiles, [&](BackwardTile& tile) { prepare_pairs(p, task.batch, tile, memory); });
        run_units(p, task, tiles, count, pass);
        for (float& factor : factors) factor = p.scale;
        for (int64_t n = 0; n < count; n++)
            write_query_gradient<BFloat16>(p, task.batch, tiles[n], factors);
    }
}

static int64_t scratch_of_forward(const Problem& p, int64_t task_rows) {
    return p.type == bfloat16 ? pair_forward_scratch(p, task_rows) : avx512_kernels.forward_scratch(p, task_rows);
}

static int64_t scratch_of_backward(const Problem& p, int64_t task_rows) {
    const bool pairs = p.type == bfloat16 && !p.few;
    return pairs ? pair_backward_scratch(p, task_rows) : avx512_kernels.backward_scratch(p, task_rows);
}

static void backward_unless_few(const Problem& p, const Task& task, float* sums, float* scratch) {
    if (p.few) return avx512_kernels.backward[bfloat16](p, task, sums, scratch);
    backward<BFloat16>(p, task, sums, scratch);
}

// The passes of bfloat16 of a source that defines what isa.h lists, and HAS_AMX if there are tile registers. Everything
// else is AVX-512's.
constexpr Kernels table(const char* name, bool (*supported)()) {
    Kernels pairs = {};
    pairs.name = name, pairs.supported = supported;
    pairs.forward_scratch = scratch_of_forward, pairs.forward[bfloat16] = forward<BFloat16>;
    pairs.backward_scratch = scratch_of_backward, pairs.backward[bfloat16] = backward_unless_few;
#ifdef HAS_PAIRS
    pairs.affine_columns[bfloat16] = affine_columns<BFloat16>;
#endif
    return pairs;
}

}  // namespace clearhead::ISA

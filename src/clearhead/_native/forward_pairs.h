// The forward pass of bfloat16 where the processor multiplies pairs of bfloat16. Scores and sums are float32 as ever. A
// weight is two numbers of bfloat16, its first eight bits and the next: with the first alone, outputs of values that
// cancel each other would be off by more than their own rounding.
//
// A unit of work is one tile of rows against PAIR_BLOCK keys. While its scores become weights, which takes the vector
// registers, tile registers multiply the weights of the unit before with their values and compute the scores of the next.
#pragma once
#include "forward.h"
#include "pair_layouts.h"
#include "units.h"

namespace clearhead::ISA {

constexpr int PAIR_BLOCK = 64;   // keys of a unit: what it works on lies in the nearest cache
constexpr int PAIR_CHUNK = 512;  // keys that are packed at once
constexpr float LEEWAY = 8;      // weights may grow to 2^LEEWAY before sums are scaled to a new row maximum

// 2^x to 3e-6 for x <= LEEWAY, which is below the rounding of weights; zero below −126, NaN for NaN.
INLINE Floats exp2_of_weight(Floats x) {
    Floats f;
    const Floats power = whole_power(larger(splat(-127.f), x), f);
    Floats y = f * 0.00958285294f + 0.0559064262f;
    y = y * f + 0.240240991f;
    y = y * f + 0.693124175f;
    y = y * f + 1.f;
    return y * power;
}

struct PairForward {
    static constexpr int BLOCK_KEYS = PAIR_BLOCK, CHUNK_KEYS = PAIR_CHUNK, SUMS = 1, SCORES = 1;  // products of a unit
    typedef DueProducts<SUMS + SCORES> Due;

    const Problem& p;
    const Task& task;
    Pair *copied, *values[SIDES];  // (keys × pairs of D); for each block (Dv × its pairs of keys)
    float* slots[2];  // scores (keys × V·LANES); in the place of each two come a pair of weights and what it left out
    float* masks;
    Matrix<const Pair> keys;

    void pack(int64_t start, int64_t present, int64_t padded, int side) {
        const int64_t height = height_up(p.value_dim);
        keys = find_pairs(p.key, task.batch, task.kv_head, start, present, p.dim, padded, copied);
        for (int64_t block = 0; block < padded; block += PAIR_BLOCK)
            transpose_pairs(p.value, task.batch, task.kv_head, start + block, present - block, p.value_dim, height,
                            PAIR_BLOCK / 2, smaller(PAIR_BLOCK, padded - block), values[side] + block / 2 * height);
    }

    void scores(const Unit<ForwardTile>& unit, Product* of_next) const {
        const int64_t vectors = unit.tile->vectors, lanes = vectors * LANES;
        *of_next = {{keys.at(unit.within, 0), keys.stride}, {as_pairs(unit.tile->query), lanes}, 1, pairs_up(p.dim),
                    unit.count, vectors, {slots[unit.slot], lanes}, false};
    }

    // Scores to units of log 2 in place.
    template <int V, MaskForm FORM>
    void adjust(const Unit<ForwardTile>& unit) const {
        const float scale = fabsf(p.scale);
        for (int64_t j = 0; j < unit.count; j++)
            UNROLL for (int v = 0; v < V; v++) {
                float* score = slots[unit.slot] + (j * V + v) * LANES;
                Floats x = load(score);
                x = p.softcap != 0 ? tanh(x * (scale / p.softcap)) * (p.softcap * LOG2E) : rounded(x * (scale * LOG2E));
                store(score, masked<FORM, V>(x, unit.mask, j, v));
            }
    }

    // Scores to pairs of weights in their place, exp2(factor · score − row maximum), and their sums.
    template <int V, bool DROP>
    __attribute__((always_inline)) void exponentiate(const Unit<ForwardTile>& unit, float factor, float* scores,
                                                     const Floats (&row_maxima)[V], Floats (&sums)[V], Due& due) const {
        for (int v = 0; v < V; v++) sums[v] = Floats{};
        for (int64_t j = 0; j < unit.count; j += OCTET)
            UNROLL for (int v = 0; v < V; v++) {
                Ints undropped[OCTET];
                if (DROP) dropout_mask(p, *unit.tile, task.batch, v, unit.start + j, undropped);
                due.step_of_any();
                UNROLL for (int t = 0; t < OCTET; t += 2) {
                    float* to = scores + ((j + t) * V + v) * LANES;
                    Floats x = exp2_of_weight(load(to) * factor - row_maxima[v]);
                    Floats y = exp2_of_weight(load(to + V * LANES) * factor - row_maxima[v]);
                    sums[v] += x + y;
                    if (DROP) x = only_where(undropped[t], x), y = only_where(undropped[t + 1], y);
                    store(to, reinterpret_cast<Floats>(pair_up(x, y)));
                    store(to + V * LANES, reinterpret_cast<Floats>(pair_up(remainder(x), remainder(y))));
                }
            }
    }

    // Scales what a tile has summed, with the outputs that are still due, to new row maxima if some have risen too far.
    template <int V>
    __attribute__((always_inline)) void raise_maxima(ForwardTile& tile, const Floats (&maxima)[V], Due& due) const {
        Floats risen = splat(-INFINITY);
        for (int v = 0; v < V; v++) risen = larger(maxima[v] - load(tile.row_max + v * LANES), risen);
        if (largest_lane(risen) <= LEEWAY) return;
        finish(due.products[0]);
        Floats rescale[V];
        for (int v = 0; v < V; v++) {
            const Floats before = load(tile.row_max + v * LANES), after = larger(maxima[v], before);
            rescale[v] = exp2(before - after);
            store(tile.row_max + v * LANES, after);
            store(tile.sum + v * LANES, load(tile.sum + v * LANES) * rescale[v]);
        }
        const int64_t height = height_up(p.value_dim);
        for (int64_t d = 0; d < height; d++)
            UNROLL for (int v = 0; v < V; v++) {
                float* output = tile.sums + (d * V + v) * LANES;
                store(output, load(output) * rescale[v]);
            }
    }

    template <int V>
    void weigh(const Unit<ForwardTile>& unit, Due& due) const {
        ForwardTile& tile = *unit.tile;
        float* scores = slots[unit.slot];
        const float factor = unit.adjusted ? 1 : fabsf(p.scale) * LOG2E;
        Floats row_maxima[V], sums[V];
        for (int v = 0; v < V; v++) row_maxima[v] = splat(LOWEST);
        for (int64_t j = 0; j < unit.count; j++)
            UNROLL for (int v = 0; v < V; v++) row_maxima[v] = larger(load(scores + (j * V + v) * LANES), row_maxima[v]);
        for (int v = 0; v < V; v++) row_maxima[v] *= factor;
        raise_maxima<V>(tile, row_maxima, due);
        for (int v = 0; v < V; v++) row_maxima[v] = load(tile.row_max + v * LANES);
        if (p.drop_below)
            exponentiate<V, true>(unit, factor, scores, row_maxima, sums, due);
        else
            exponentiate<V, false>(unit, factor, scores, row_maxima, sums, due);
        for (int v = 0; v < V; v++) store(tile.sum + v * LANES, load(tile.sum + v * LANES) + sums[v]);
    }

    void sums(const Unit<ForwardTile>& unit, Product* of_before) const {
        const int64_t vectors = unit.tile->vectors, lanes = vectors * LANES, height = height_up(p.value_dim);
        const int64_t skipped = unit.start % PAIR_BLOCK;
        const Pair* block = values[unit.side] + (unit.within - skipped) / 2 * height + skipped / 2;
        const Pair* weights = reinterpret_cast<const Pair*>(slots[unit.slot]);
        *of_before = {{block, PAIR_BLOCK / 2}, {weights, lanes}, 2, unit.count / 2, height, vectors,
                      {unit.tile->sums, lanes}, true};
    }
};

static int64_t pair_forward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t rows = round_up(task_rows, TILE), pairs = pairs_up(p.dim), height = height_up(p.value_dim);
    const int64_t of_chunk = PAIR_CHUNK * (pairs + SIDES * height / 2), of_units = 2 * PAIR_BLOCK * TILE;
    return of_chunk + of_units + MASK_SCRATCH_FLOATS + rows * (pairs + 2 * height) + 16 * (7 + 3 * MOST_TILES);
}

INLINE Pair* take_pairs(float*& scratch, int64_t count) { return as_pairs(take(scratch, count)); }

template <>
void forward<BFloat16>(const Problem& p, const Task& task, float* scratch) {
    const int64_t height = height_up(p.value_dim);
    PairForward pass = {p, task};
    pass.copied = take_pairs(scratch, PAIR_CHUNK * pairs_up(p.dim));
    for (Pair*& values : pass.values) values = take_pairs(scratch, height * PAIR_CHUNK / 2);
    for (float*& scores : pass.slots) scores = take(scratch, PAIR_BLOCK * TILE);
    pass.masks = take(scratch, MASK_SCRATCH_FLOATS);
    ForwardTile tiles[MOST_TILES];
    const int64_t count = describe_tiles(p, task, task.row_start, task.row_stop, tiles, [&](ForwardTile& tile) {
        tile.query = take(scratch, pairs_up(p.dim) * tile.vectors * LANES);
        // A negative scale turns the queries round, so that the largest product is always the largest score.
        rows_to_pairs(p.query, tile, task.batch, p.dim, pairs_up(p.dim), p.scale < 0, as_pairs(tile.query));
        begin_outputs(tile, height, p.keys > PAIR_RUN, scratch);
    });
    const TileRegisters registers;
    run_units(p, task, tiles, count, pass);
    for (int64_t n = 0; n < count; n++) finish<BFloat16>(p, tiles[n], task.batch);
}

}  // namespace clearhead::ISA

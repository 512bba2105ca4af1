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
constexpr int PAIR_RUN = 1024;   // keys that are summed without a total: tile registers add to the sums there are
constexpr float LEEWAY = 8;      // weights may grow to 2^LEEWAY before sums are scaled to a new row maximum

struct PairBuffers {
    Pair *copied, *values[SIDES];  // (keys × pairs of D); for each block (Dv × its pairs of keys)
    float* scores[2];  // (keys × V·LANES); in the place of each two come a pair of weights and what it left out
    float* masks;
    Matrix<const Pair> keys;
};

static Product scores_of(const Problem& p, const Unit<ForwardTile>& unit, const PairBuffers& buffers) {
    const int64_t vectors = unit.tile->vectors, lanes = vectors * LANES;
    return {{buffers.keys.data + unit.within * buffers.keys.stride, buffers.keys.stride}, {as_pairs(unit.tile->query), lanes},
            1, pairs_up(p.dim), unit.count, vectors, {buffers.scores[unit.slot], lanes}, false};
}

static Product outputs_of(const Problem& p, const Unit<ForwardTile>& unit, const PairBuffers& buffers) {
    const int64_t vectors = unit.tile->vectors, lanes = vectors * LANES, height = height_up(p.value_dim);
    const int64_t skipped = unit.start % PAIR_BLOCK;
    const Pair* values = buffers.values[unit.side] + (unit.within - skipped) / 2 * height + skipped / 2;
    const Pair* weights = reinterpret_cast<const Pair*>(buffers.scores[unit.slot]);
    return {{values, PAIR_BLOCK / 2}, {weights, lanes}, 2, unit.count / 2, height, vectors, {unit.tile->output, lanes}, true};
}

// Scores to units of log 2 in place, where more is to be done than multiplying them with a factor.
template <int V, MaskForm FORM>
static void adjust(const Problem& p, const Unit<ForwardTile>& unit, float* scores) {
    const float scale = fabsf(p.scale);
    for (int64_t j = 0; j < unit.count; j++)
        UNROLL for (int v = 0; v < V; v++) {
            float* score = scores + (j * V + v) * LANES;
            Floats x = load(score);
            x = p.softcap != 0 ? tanh(x * (scale / p.softcap)) * (p.softcap * LOG2E) : rounded(x * (scale * LOG2E));
            store(score, masked<FORM, V>(x, unit.mask, j, v));
        }
}

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

// Scores to pairs of weights in their place, exp2(factor · score − row maximum), and their sums.
template <int V, bool DROP, class Beside>
INLINE void exponentiate_pairs(const Problem& p, const Unit<ForwardTile>& unit, int64_t batch, float factor, float* scores,
                               const Floats (&row_maxima)[V], Floats (&sums)[V], const Beside& beside) {
    for (int v = 0; v < V; v++) sums[v] = Floats{};
    for (int64_t j = 0; j < unit.count; j += GROUP)
        UNROLL for (int v = 0; v < V; v++) {
            Ints undropped[GROUP];
            if (DROP) dropout_mask(p, *unit.tile, batch, v, unit.start + j, undropped);
            beside();
            UNROLL for (int t = 0; t < GROUP; t += 2) {
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
INLINE void raise_maxima(const Problem& p, ForwardTile& tile, const Floats (&maxima)[V], Product& due) {
    Floats risen = splat(-INFINITY);
    for (int v = 0; v < V; v++) risen = larger(maxima[v] - load(tile.row_max + v * LANES), risen);
    if (largest_lane(risen) <= LEEWAY) return;
    finish(due);
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
            float* output = tile.output + (d * V + v) * LANES;
            store(output, load(output) * rescale[v]);
        }
}

// Makes the unit's scores weights, and takes steps of the two products beside it.
template <int V>
static void weigh_pairs(const Problem& p, const Unit<ForwardTile>& unit, int64_t batch, float factor, float* scores,
                        Product& due, Product& ahead) {
    ForwardTile& tile = *unit.tile;
    Floats row_maxima[V], sums[V];
    for (int v = 0; v < V; v++) row_maxima[v] = splat(LOWEST);
    for (int64_t j = 0; j < unit.count; j++)
        UNROLL for (int v = 0; v < V; v++) row_maxima[v] = larger(load(scores + (j * V + v) * LANES), row_maxima[v]);
    for (int v = 0; v < V; v++) row_maxima[v] *= factor;
    raise_maxima<V>(p, tile, row_maxima, due);
    const auto beside = [&] {
        if (due.unfinished())
            step(due);
        else if (ahead.unfinished())
            step(ahead);
    };
    for (int v = 0; v < V; v++) row_maxima[v] = load(tile.row_max + v * LANES);
    if (p.drop_below)
        exponentiate_pairs<V, true>(p, unit, batch, factor, scores, row_maxima, sums, beside);
    else
        exponentiate_pairs<V, false>(p, unit, batch, factor, scores, row_maxima, sums, beside);
    for (int v = 0; v < V; v++) store(tile.sum + v * LANES, load(tile.sum + v * LANES) + sums[v]);
}

static int64_t pair_forward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t rows = round_up(task_rows, TILE), pairs = pairs_up(p.dim), height = height_up(p.value_dim);
    const int64_t of_chunk = PAIR_CHUNK * (pairs + SIDES * height / 2), of_units = 2 * PAIR_BLOCK * TILE;
    return of_chunk + of_units + MASK_SCRATCH_FLOATS + rows * (pairs + 2 * height) + 16 * (7 + 3 * MOST_TILES);
}

INLINE Pair* take_pairs(float*& scratch, int64_t count) { return as_pairs(take(scratch, count)); }

template <>
void forward<BFloat16>(const Problem& p, const Task& task, float* scratch) {
    const int64_t height = height_up(p.value_dim);
    PairBuffers buffers;
    buffers.copied = take_pairs(scratch, PAIR_CHUNK * pairs_up(p.dim));
    for (Pair*& values : buffers.values) values = take_pairs(scratch, height * PAIR_CHUNK / 2);
    for (float*& scores : buffers.scores) scores = take(scratch, PAIR_BLOCK * TILE);
    buffers.masks = take(scratch, MASK_SCRATCH_FLOATS);
    ForwardTile tiles[MOST_TILES];
    const int64_t count = describe_tiles(p, task, task.row_start, task.row_stop, tiles, [&](ForwardTile& tile) {
        tile.query = take(scratch, pairs_up(p.dim) * tile.vectors * LANES);
        // A negative scale turns the queries round, so that the largest product is always the largest score.
        rows_to_pairs(p.query, tile, task.batch, p.dim, pairs_up(p.dim), p.scale < 0, as_pairs(tile.query));
        begin_sums(tile, height, p.keys > PAIR_RUN, scratch);
    });
    const auto pack = [&](int64_t start, int64_t present, int64_t padded, int side) {
        buffers.keys = find_pairs(p.key, task.batch, task.kv_head, start, present, p.dim, padded, buffers.copied);
        for (int64_t block = 0; block < padded; block += PAIR_BLOCK)
            transpose_pairs(p.value, task.batch, task.kv_head, start + block, present - block, p.value_dim, height,
                            PAIR_BLOCK / 2, smaller(PAIR_BLOCK, padded - block), buffers.values[side] + block / 2 * height);
    };
    const TileRegisters registers;
    Units<ForwardTile, decltype(pack)> units(p, task, tiles, count, PAIR_BLOCK, PAIR_CHUNK, buffers.masks, pack);
    Unit<ForwardTile> now, next;
    Product due = {}, ahead = {};
    bool has_next = units.next(now);
    if (has_next) ahead = scores_of(p, now, buffers);
    finish(ahead);
    while (has_next) {
        float* scores = buffers.scores[now.slot];
        const bool adjusted = p.softcap != 0 || now.masked();
        if (adjusted)
            by_vectors(now.tile->vectors, [&](auto v) {
                by_form(now.mask, [&](auto form) { adjust<v.value, form()>(p, now, scores); });
            });
        const float factor = adjusted ? 1 : fabsf(p.scale) * LOG2E;
        has_next = units.next(next);
        ahead = has_next ? scores_of(p, next, buffers) : Product();
        by_vectors(now.tile->vectors,
                   [&](auto v) { weigh_pairs<v.value>(p, now, task.batch, factor, scores, due, ahead); });
        finish(due);
        finish(ahead);
        if (now.tile->summed + now.count > PAIR_RUN) end_run(*now.tile);
        now.tile->summed += now.count;
        due = outputs_of(p, now, buffers);
        now = next;
    }
    finish(due);
    for (int64_t n = 0; n < count; n++) finish<BFloat16>(p, tiles[n], task.batch);
}

}  // namespace clearhead::ISA

// Scores of a panel in double precision. The rounding of a score is a relative error of its weight. In float32, products
// of long vectors lose the seventh digit of a weight. Less its row maximum, a score fits float32.
#pragma once
#include "score_panel.h"

namespace clearhead::ISA {

constexpr int HALF = LANES / 2;
constexpr int EXACT_STEP = LANES == 16 ? 4 : 2;  // keys whose sums are in registers at once

typedef double LooseDoubles __attribute__((vector_size(LANES * 4), aligned(8)));
typedef int64_t DoubleInts __attribute__((vector_size(LANES * 4)));

INLINE Doubles splat(double x) { return x - Doubles{}; }
INLINE Doubles load(const double* from) { return *reinterpret_cast<const LooseDoubles*>(from); }
INLINE void store(double* to, Doubles x) { *reinterpret_cast<LooseDoubles*>(to) = x; }
INLINE Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }
INLINE Doubles load_double(const float* from) {
    return __builtin_convertvector(*reinterpret_cast<const HalfFloats*>(from), Doubles);
}

// Queries (D × V·LANES) and scores (keys × V·LANES) of one panel, in units of log 2, and the row maxima. `raw_max` is
// before soft-cap and bias, in `unit_of_raw`.
struct ExactScores {
    double *query = nullptr, *scores = nullptr, *row_max = nullptr, *raw_max = nullptr;
};

static int64_t exact_scratch(const Problem& p, int64_t keys) { return 2 * (p.dim + keys + 2) * TILE + 4 * 16; }

static ExactScores exact_scores(const Problem& p, int64_t keys, float*& scratch) {
    const auto doubles = [&](int64_t count) { return reinterpret_cast<double*>(take(scratch, 2 * count)); };
    return {doubles(p.dim * TILE), doubles(keys * TILE), doubles(TILE), doubles(TILE)};
}

static void widen_query(const Problem& p, const ScorePanel& panel, const ExactScores& exact) {
    for (int64_t n = 0; n < p.dim * panel.tile.vectors * LANES; n++) exact.query[n] = panel.tile.query[n];
    for (int lane = 0; lane < TILE; lane++) exact.row_max[lane] = exact.raw_max[lane] = -INFINITY;
}

// Applies the mask of a tile to half `h` of the lanes. Its bias is not in units of log 2.
template <MaskForm FORM, int V>
INLINE Doubles masked(Doubles score, const TileMask& mask, int64_t key, int h) {
    if (FORM == MaskForm::bits) {
        DoubleInts lanes;
        for (int lane = 0; lane < HALF; lane++) lanes[lane] = int64_t(1) << (h % 2 * HALF + lane);
        const int64_t bits = mask.bits[h / 2 * BLOCK + key];
        return ((bits - DoubleInts{}) & lanes) != 0 ? score : splat(-double(INFINITY));
    }
    if (FORM == MaskForm::numbers) {
        const Doubles added = load_double(mask.numbers + key * V * LANES + h * HALF);
        return added == splat(-double(INFINITY)) ? added : score + added * LOG2_OF_E;
    }
    return score;
}

// to[t][h] = Σ_k rows[t·D + k] · query[k], of EXACT_STEP keys.
template <int V>
INLINE void multiply_exactly(Doubles (&acc)[EXACT_STEP][2 * V], const float* rows, const double* query, int64_t dim) {
    for (int64_t k = 0; k < dim; k++) {
        Doubles right[2 * V];
        UNROLL for (int h = 0; h < 2 * V; h++) right[h] = load(query + (k * 2 * V + h) * HALF);
        UNROLL for (int t = 0; t < EXACT_STEP; t++) {
            const double left = rows[t * dim + k];
            UNROLL for (int h = 0; h < 2 * V; h++) acc[t][h] += left * right[h];
        }
    }
}

template <int V, MaskForm FORM, bool RAW>
static void score_keys_exactly(const Problem& p, const float* rows, int64_t count, const TileMask& mask,
                               const double* query, double* to, double* row_max, double* raw_max) {
    const bool capped = p.exact_softcap != 0;
    const double factor = capped ? p.exact_scale / p.exact_softcap : p.exact_scale * LOG2_OF_E;
    Doubles best[2 * V], raw_best[2 * V];
    for (int h = 0; h < 2 * V; h++) best[h] = load(row_max + h * HALF), raw_best[h] = load(raw_max + h * HALF);
    for (int64_t j = 0; j < count; j += EXACT_STEP) {
        Doubles acc[EXACT_STEP][2 * V] = {};
        multiply_exactly<V>(acc, rows + j * p.dim, query, p.dim);
        UNROLL for (int t = 0; t < EXACT_STEP; t++)
            for (int h = 0; h < 2 * V; h++) {
                Doubles x = acc[t][h] * factor;
                [[maybe_unused]] const Doubles raw = x;
                if (capped)
                    for (int lane = 0; lane < HALF; lane++) x[lane] = ::tanh(x[lane]) * p.exact_softcap * LOG2_OF_E;
                x = masked<FORM, V>(x, mask, j + t, h);
                best[h] = larger(x, best[h]);
                if (RAW) raw_best[h] = larger(x > splat(-double(INFINITY)) ? raw : x, raw_best[h]);
                store(to + ((j + t) * 2 * V + h) * HALF, x);
            }
    }
    for (int h = 0; h < 2 * V; h++) store(row_max + h * HALF, best[h]), store(raw_max + h * HALF, raw_best[h]);
}

// Computes the scores of a block, and updates the row maxima.
template <int V>
static void score_exactly(const Problem& p, const ScorePanel& panel, const KeyBlock& block, const TileMask& mask,
                          const ExactScores& exact) {
    double* to = exact.scores + (block.start - panel.start) * V * LANES;
    by_form(mask, [&](auto form) {
        const auto score = panel.raw_max ? score_keys_exactly<V, form.value, true> : score_keys_exactly<V, form.value, false>;
        score(p, block.rows, block.count(), mask, exact.query, to, exact.row_max, exact.raw_max);
    });
}

// Stores the scores less their row maxima in the panel, with the row maxima of its octets.
template <int V>
static void store_shifted(ScorePanel& panel, const ExactScores& exact) {
    for (int64_t lane = 0; lane < V * LANES; lane++) {
        const bool sees = exact.row_max[lane] > -INFINITY;
        panel.shift[lane] = sees ? exact.row_max[lane] : 0;
        panel.tile.row_max[lane] = sees ? 0 : LOWEST;
        if (panel.raw_max) panel.raw_max[lane] = static_cast<float>(exact.raw_max[lane]);
    }
    each_visible_block(panel, [&](int64_t start, int64_t stop, int64_t block) {
        float* octet_maxima = panel.maxima_of(block);
        for (int64_t octet = start; octet < stop; octet += OCTET, octet_maxima += V * LANES) {
            for (int v = 0; v < V; v++) store(octet_maxima + v * LANES, splat(-INFINITY));
            for (int64_t place = (octet - panel.start) * V * LANES; place < (octet + OCTET - panel.start) * V * LANES;
                 place += LANES) {
                const int64_t lane = place % (V * LANES);
                for (int h = 0; h < 2; h++) {
                    const Doubles x = load(exact.scores + place + h * HALF);
                    const Doubles shifted = larger(splat(double(LOWEST)), x - load(panel.shift + lane + h * HALF));
                    const Doubles stored = (x != x) | (x == splat(-double(INFINITY))) ? x : shifted;
                    *reinterpret_cast<HalfFloats*>(panel.scores + place + h * HALF) =
                        __builtin_convertvector(stored, HalfFloats);
                }
                store(octet_maxima + lane, larger(load(panel.scores + place), load(octet_maxima + lane)));
            }
        }
    });
}

}  // namespace clearhead::ISA

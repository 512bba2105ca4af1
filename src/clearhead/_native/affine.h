// Products of few rows: y = f(x Wᵀ + b). Every number of the weights is read once from memory, in the order in which a linear
// layer keeps them, so no other layout of them is needed.
#pragma once
#include "tile.h"

namespace clearhead::ISA {

constexpr int FEW_ROWS = STEP / 2, FEW_COLUMNS = 4;  // whose sums are in registers

// Whole vectors of numbers side by side, as `dot` adds up their products.
template <class T>
struct Factor {
    static constexpr int WIDTH = LANES;
    Floats numbers;

    INLINE Factor whole(const T* from) { return {load_wide(from)}; }
    INLINE Factor some(const T* from, int64_t count) { return {load_some(from, count)}; }
    INLINE Floats dot(Floats sum, Factor a, Factor b) { return sum + a.numbers * b.numbers; }
};

#ifdef HAS_PAIRS
template <>
struct Factor<BFloat16> {
    static constexpr int WIDTH = 2 * LANES;
    __m512i numbers;

    INLINE Factor whole(const BFloat16* from) { return {_mm512_loadu_si512(from)}; }
    INLINE Factor some(const BFloat16* from, int64_t count) {
        return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t(1) << count) - 1), from)};
    }
    INLINE Floats dot(Floats sum, Factor a, Factor b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a.numbers), reinterpret_cast<__m512bh>(b.numbers));
    }
};
#endif

// The sums of FEW_ROWS × FEW_COLUMNS products of rows with `inner` numbers. Meanwhile it prefetches `lines` cache lines a
// step from `next` on.
template <class T>
INLINE void dot_products(const T* const (&x)[FEW_ROWS], const T* const (&weights)[FEW_COLUMNS], int64_t inner,
                         const T* next, int64_t lines, Floats (&sums)[FEW_ROWS * FEW_COLUMNS]) {
    typedef Factor<T> Some;
    const auto add = [&](const auto& factor) __attribute__((always_inline)) {
        Some columns[FEW_COLUMNS];
        UNROLL for (int c = 0; c < FEW_COLUMNS; c++) columns[c] = factor(weights[c]);
        UNROLL for (int r = 0; r < FEW_ROWS; r++) {
            const Some row = factor(x[r]);
            UNROLL for (int c = 0; c < FEW_COLUMNS; c++)
                sums[r * FEW_COLUMNS + c] = Some::dot(sums[r * FEW_COLUMNS + c], row, columns[c]);
        }
    };
    int64_t k = 0;
    for (; k + Some::WIDTH <= inner; k += Some::WIDTH) {
        for (int64_t line = 0; line < lines; line++, next += Some::WIDTH) __builtin_prefetch(next, 0, 2);
        add([k](const T* from) __attribute__((always_inline)) { return Some::whole(from + k); });
    }
    if (k < inner) add([=](const T* from) __attribute__((always_inline)) { return Some::some(from + k, inner - k); });
}

// The distribution function of the standard normal distribution to 1e-7. With t = 1 / (1 + 0.3z) it takes erfc(z) as
// e^(−z²) · t · P(t), where P is a minimax polynomial.
INLINE Floats normal_distribution(Floats x) {
    constexpr float P[] = {-0.129434288f, 0.485097468f, -0.511228502f, 0.546397388f, -0.0936328396f,
                           0.214436933f,  0.148482263f, 0.170691952f,  0.169189617f};
    const Floats z = (x < Floats{} ? -x : x) * 0.707106781f;
    const Floats t = 1.f / (1.f + 0.3f * z);
    Floats p = splat(P[0]);
    UNROLL for (int n = 1; n < 9; n++) p = p * t + P[n];
    const Floats tail = 0.5f * t * p * exp2(z * z * -LOG2E);
    return x < Floats{} ? tail : 1.f - tail;
}

INLINE Floats activated(Floats x, Activation activation) {
    switch (activation) {
        case Activation::relu: return x < Floats{} ? Floats{} : x;  // keeps NaN
        case Activation::tanh: return tanh(x);
        case Activation::gelu: return x * normal_distribution(x);
        case Activation::gelu_tanh: return 0.5f * x * (1.f + tanh(0.797884561f * x * (1.f + 0.044715f * x * x)));
        case Activation::silu: return x / (1.f + exp2(larger(x, splat(-88.f)) * -LOG2E));
        default: return x;
    }
}

// The sums of one tile of rows and FEW_COLUMNS columns, to rows that lie `stride` apart.
INLINE void store_sums(const Floats* sums, float* to, int64_t stride) {
    UNROLL for (int n = 0; n < FEW_ROWS * FEW_COLUMNS; n += LANES) {
        const Floats joined = join_sums<1, LANES>(sums + n);
        float lanes[LANES];
        store(lanes, joined);
        UNROLL for (int lane = 0; lane < LANES; lane += FEW_COLUMNS)
            memcpy(to + (n + lane) / FEW_COLUMNS * stride, lanes + lane, FEW_COLUMNS * sizeof(float));
    }
}

// The columns from `start` on, up to `stop`. Needs scratch for them and the rows, each rounded up to a tile's.
template <class T>
static void affine_columns(const Affine& a, int64_t start, int64_t stop, float* scratch) {
    const T *x = static_cast<const T*>(a.x), *weight = static_cast<const T*>(a.weight);
    const int64_t width = round_up(stop - start, FEW_COLUMNS), tiles = divide_up(a.rows, FEW_ROWS);
    const int64_t fetched = divide_up(FEW_COLUMNS, tiles);  // rows of the next weights, for each tile
    for (int64_t column = start; column < stop; column += FEW_COLUMNS) {
        const T *weights[FEW_COLUMNS], *rows[FEW_ROWS];
        for (int64_t c = 0; c < FEW_COLUMNS; c++) weights[c] = weight + smaller(column + c, stop - 1) * a.inner;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = tile * FEW_ROWS, next = column + FEW_COLUMNS + tile * fetched;
            for (int64_t r = 0; r < FEW_ROWS; r++) rows[r] = x + smaller(row + r, a.rows - 1) * a.inner;
            const bool fetches = tile * fetched < FEW_COLUMNS && next + fetched <= a.outer;
            Floats sums[FEW_ROWS * FEW_COLUMNS] = {};
            dot_products(rows, weights, a.inner, weight + next * a.inner, fetches ? fetched : 0, sums);
            store_sums(sums, scratch + row * width + column - start, width);
        }
    }
    const T* bias = static_cast<const T*>(a.bias);
    for (int64_t row = 0; row < a.rows; row++)
        for (int64_t column = start; column < stop; column += LANES) {
            const int64_t count = stop - column;
            Floats y = load_some(scratch + row * width + column - start, count);
            if (bias) y += load_some(bias + column, count);
            store_some(static_cast<T*>(a.y) + row * a.outer + column, activated(y, a.activation), count);
        }
}

}  // namespace clearhead::ISA

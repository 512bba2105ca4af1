// Products of bfloat16 with sums in float32, for processors that have them. Two neighbours of a sum lie in one word of
// 32 bits, as `vdpbf16ps` and AMX's `tdpbf16ps` want them. Rows of a product lie in memory, its columns in the lanes.
#pragma once
#include "tile.h"

namespace clearhead::ISA {

typedef uint32_t Pair;

INLINE Pair* as_pairs(float* x) { return reinterpret_cast<Pair*>(x); }

// Rows lie `stride` numbers of 32 bits apart.
template <class T>
struct Matrix {
    T* data;
    int64_t stride;

    T* at(int64_t row, int64_t vector) const { return data + row * stride + vector * LANES; }
};

// Unrolls f(0), f(1) … with numbers that are constants.
template <class Work, int... I>
INLINE void each(const Work& work, Numbers<I...>) {
    (work(Constant<I>()), ...);
}
template <int N, class Work>
INLINE void each(const Work& work) {
    each(work, std::make_integer_sequence<int, N>());
}

// A product in small steps: sums (rows × vectors·LANES) = or += left (rows × count pairs) · right (count pairs ×
// vectors·LANES). If right has two terms, each row of pairs is followed by what its rounding left out. The tile registers
// work beside the vector units, so steps are put between instructions that are not about them. Rows are a multiple of
// ROWS_AT_ONCE, pairs of PAIRS_AT_ONCE. Sums stay in registers between steps, so a product that has begun is ended first.
struct Product {
    Matrix<const Pair> left, right;
    int64_t terms, count, rows, vectors;
    Matrix<float> sums;
    bool add;
    int64_t column, row, pair, half;  // where it is

    bool unfinished() const { return column < vectors; }
};

#ifdef HAS_AMX
constexpr int ROWS_AT_ONCE = 16, PAIRS_AT_ONCE = 16;  // of one tile register

template <int REGISTER>
INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}
template <int REGISTER>
INLINE void store_tile(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(to), "r"(stride), "i"(REGISTER) : "memory");
}
template <int SUM>
INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(SUM));
}
template <int SUM, int LEFT, int RIGHT>
INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

// While it lives, every tile register of this thread is 16 rows of 64 bytes; then whatever it was before.
class TileRegisters {
  public:
    TileRegisters() {
        Shapes shapes = {1, 0, {}, {}, {}};
        for (int n = 0; n < 8; n++) shapes.bytes[n] = 64, shapes.rows[n] = 16;
        asm volatile("sttilecfg %0" : "=m"(before_));
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~TileRegisters() { asm volatile("ldtilecfg %0" ::"m"(before_)); }

  private:
    struct alignas(64) Shapes {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    Shapes before_;
};

// Tiles 0 … H·W − 1 hold the sums of H·16 rows, 6 and 7 what is multiplied.
template <int H, int W>
INLINE void begin_rows(const Product& p) {
    each<H * W>([&](auto n) {
        constexpr int tile = n.value;
        if (p.add)
            load_tile<tile>(p.sums.at(p.row + tile / W * 16, p.column + tile % W), p.sums.stride);
        else
            clear_tile<tile>();
    });
}
template <int H, int W>
INLINE void end_rows(const Product& p) {
    each<H * W>([&](auto n) {
        constexpr int tile = n.value;
        store_tile<tile>(p.sums.at(p.row + tile / W * 16, p.column + tile % W), p.sums.stride);
    });
}

// The first or the second 16 rows. The last right factor of the first is the first of the second, which goes backwards.
template <int H, int W>
INLINE void multiply_rows(const Product& p) {
    load_tile<6>(p.left.at(p.row + H * 16, 0) + p.pair, p.left.stride);
    each<W>([&](auto n) {
        constexpr int w = H ? W - 1 - n.value : n.value;
        const Pair* right = p.right.at(p.terms * p.pair, p.column + w);
        if (H == 0 || n.value > 0 || p.terms == 2) load_tile<7>(right, p.terms * p.right.stride);
        multiply_tiles<H * W + w, 6, 7>();
        if (p.terms == 1) return;
        load_tile<7>(right + p.right.stride, 2 * p.right.stride);
        multiply_tiles<H * W + w, 6, 7>();
    });
}

// Both, where their sums leave room for all that is multiplied, of one term.
INLINE void multiply_square(const Product& p) {
    load_tile<4>(p.left.at(p.row, 0) + p.pair, p.left.stride);
    load_tile<6>(p.right.at(p.pair, p.column), p.right.stride);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(p.right.at(p.pair, p.column + 1), p.right.stride);
    multiply_tiles<1, 4, 7>();
    load_tile<5>(p.left.at(p.row + 16, 0) + p.pair, p.left.stride);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
}

// At most six multiplications of tiles.
template <int W>
INLINE void step(Product& p) {
    const bool two = p.row + 32 <= p.rows;
    if (p.half == 0 && p.pair == 0) two ? begin_rows<2, W>(p) : begin_rows<1, W>(p);
    if (W == 2 && two && p.terms == 1) {
        multiply_square(p);
    } else if (p.half == 0) {
        multiply_rows<0, W>(p);
        p.half = two;
        if (two) return;
    } else {
        multiply_rows<1, W>(p);
        p.half = 0;
    }
    p.pair += PAIRS_AT_ONCE;
    if (p.pair < p.count) return;
    two ? end_rows<2, W>(p) : end_rows<1, W>(p);
    p.pair = 0, p.row += two ? 32 : 16;
    if (p.row >= p.rows) p.row = 0, p.column += W;
}

// A step of a product that is not at its end.
INLINE void step(Product& p) {
    by_vectors(columns_at_once(p.vectors - p.column), [&](auto width) { step<width.value>(p); });
}

static void finish(Product& p) {
    while (p.unfinished()) step(p);
}

#else
constexpr int ROWS_AT_ONCE = STEP, PAIRS_AT_ONCE = 1;

struct TileRegisters {
    ~TileRegisters() {}
};

INLINE void step(Product&) {}

template <int W>
static void multiply_columns(const Product& p) {
    for (int64_t row = 0; row < p.rows; row += STEP) {
        const Pair* left = p.left.at(row, 0);
        __m512 acc[STEP][W];
        UNROLL for (int t = 0; t < STEP; t++)
            UNROLL for (int w = 0; w < W; w++)
                acc[t][w] = p.add ? _mm512_loadu_ps(p.sums.at(row + t, p.column + w)) : _mm512_setzero_ps();
        for (int64_t k = 0; k < p.terms * p.count; k++) {
            __m512i columns[W];
            UNROLL for (int w = 0; w < W; w++) columns[w] = _mm512_loadu_si512(p.right.at(k, p.column + w));
            UNROLL for (int t = 0; t < STEP; t++) {
                const __m512i pair = _mm512_set1_epi32(static_cast<int>(left[t * p.left.stride + k / p.terms]));
                UNROLL for (int w = 0; w < W; w++)
                    acc[t][w] = _mm512_dpbf16_ps(acc[t][w], reinterpret_cast<__m512bh>(pair),
                                                 reinterpret_cast<__m512bh>(columns[w]));
            }
        }
        UNROLL for (int t = 0; t < STEP; t++)
            UNROLL for (int w = 0; w < W; w++) _mm512_storeu_ps(p.sums.at(row + t, p.column + w), acc[t][w]);
    }
}

static void finish(Product& p) {
    while (p.unfinished()) {
        const int64_t width = columns_at_once(p.vectors - p.column);
        by_vectors(width, [&](auto w) { multiply_columns<w.value>(p); });
        p.column += width;
    }
}
#endif

}  // namespace clearhead::ISA

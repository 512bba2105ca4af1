// Products of bfloat16 with sums in float32, for processors that have them. Two neighbours of a sum lie in one word of
// 32 bits, as `vdpbf16ps` and AMX's `tdpbf16ps` want them. Rows of a product lie in memory, its columns in the lanes.

typedef uint32_t Pair;

// Unrolls f(0), f(1) … with numbers that are constants.
template <class Work, int... I>
INLINE void each(const Work& work, Numbers<I...>) {
    (work(Number<I>()), ...);
}
template <int N, class Work>
INLINE void each(const Work& work) {
    each(work, typename Count<N>::Type());
}

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

// A product in small steps: sums (rows × V·LANES) = left (rows × count pairs) · right (count pairs × V·LANES), or, if
// split, sums += left · right where right is twice as high: each row of pairs is followed by what its rounding left out.
// The tile registers work beside the vector units, so its steps are put between instructions that are not about it.
// Rows are a multiple of ROWS_AT_ONCE, pairs of PAIRS_AT_ONCE.
struct Product {
    const Pair *left, *right;
    int64_t stride, count, rows, vectors;  // stride of left, in pairs; no vectors: no product
    float* sums;
    bool split;
    int64_t row, pair, half;

    bool left_over() const { return row < rows; }
};

// Tiles 0 … H·V − 1 hold the sums of H·16 rows, 6 and 7 what is multiplied.
template <int H, int V>
INLINE void begin_rows(const Product& p) {
    float* to = p.sums + p.row * V * LANES;
    each<H * V>([&](auto n) {
        constexpr int tile = n.value;
        if (p.split)
            load_tile<tile>(to + tile / V * 16 * V * LANES + tile % V * LANES, V * LANES);
        else
            clear_tile<tile>();
    });
}
template <int H, int V>
INLINE void end_rows(const Product& p) {
    float* to = p.sums + p.row * V * LANES;
    each<H * V>([&](auto n) {
        constexpr int tile = n.value;
        store_tile<tile>(to + tile / V * 16 * V * LANES + tile % V * LANES, V * LANES);
    });
}
template <int H, int V>
INLINE void multiply_rows(const Product& p) {
    load_tile<6>(p.left + (p.row + H * 16) * p.stride + p.pair, p.stride);
    const int64_t parts = p.split ? 2 : 1;
    each<V>([&](auto v) {
        const Pair* right = p.right + (p.pair * parts * V + v.value) * LANES;
        load_tile<7>(right, parts * V * LANES);
        multiply_tiles<H * V + v.value, 6, 7>();
        if (!p.split) return;
        load_tile<7>(right + V * LANES, parts * V * LANES);
        multiply_tiles<H * V + v.value, 6, 7>();
    });
}

// V multiplications of tiles, or 2·V if split.
template <int V>
INLINE void step(Product& p) {
    if (p.row >= p.rows || p.vectors != V) return;
    const bool two = p.row + 32 <= p.rows;
    if (p.half == 0) {
        if (p.pair == 0) two ? begin_rows<2, V>(p) : begin_rows<1, V>(p);
        multiply_rows<0, V>(p);
    } else {
        multiply_rows<1, V>(p);
    }
    if (two && p.half == 0) {
        p.half = 1;
        return;
    }
    p.half = 0, p.pair += PAIRS_AT_ONCE;
    if (p.pair < p.count) return;
    two ? end_rows<2, V>(p) : end_rows<1, V>(p);
    p.pair = 0, p.row += two ? 32 : 16;
}

template <int V>
static void finish(Product& p) {
    while (p.row < p.rows) step<V>(p);
}

#else
constexpr int ROWS_AT_ONCE = STEP, PAIRS_AT_ONCE = 1;

struct TileRegisters {
    ~TileRegisters() {}
};

struct Product {
    const Pair *left, *right;
    int64_t stride, count, rows, vectors;
    float* sums;
    bool split;

    bool left_over() const { return rows > 0; }
};

template <int V>
INLINE void step(Product&) {}

template <int V>
static void finish(Product& p) {
    const Pair* left = p.left;
    float* to = p.sums;
    for (int64_t j = 0; j < p.rows; j += STEP, left += STEP * p.stride, to += STEP * V * LANES) {
        __m512 acc[STEP][V];
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                acc[t][v] = p.split ? _mm512_loadu_ps(to + (t * V + v) * LANES) : _mm512_setzero_ps();
        const int64_t parts = p.split ? 2 : 1;
        for (int64_t k = 0; k < parts * p.count; k++) {
            __m512i columns[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) columns[v] = _mm512_loadu_si512(p.right + (k * V + v) * LANES);
#pragma GCC unroll 8
            for (int t = 0; t < STEP; t++) {
                const __m512i row = _mm512_set1_epi32(static_cast<int>(left[t * p.stride + k / parts]));
#pragma GCC unroll 4
                for (int v = 0; v < V; v++)
                    acc[t][v] = _mm512_dpbf16_ps(acc[t][v], reinterpret_cast<__m512bh>(row),
                                                 reinterpret_cast<__m512bh>(columns[v]));
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) _mm512_storeu_ps(to + (t * V + v) * LANES, acc[t][v]);
    }
    p.rows = 0;
}
#endif

// The lower and the upper half of a vector of halves, alternately.
INLINE Words interleave(__m512i halves) {
    static const uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return reinterpret_cast<Words>(_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), halves));
}

// The upper halves of the words of x and y, x's in the lower half of each word: both cut to bfloat16.
INLINE Words pair_up(Floats x, Floats y) {
    static const uint16_t ORDER[32] = {1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
                                       17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
    return reinterpret_cast<Words>(_mm512_permutex2var_epi16(reinterpret_cast<__m512i>(x), _mm512_loadu_si512(ORDER),
                                                             reinterpret_cast<__m512i>(y)));
}

// What that left out.
INLINE Floats remainder(Floats x) { return x - reinterpret_cast<Floats>(reinterpret_cast<Words>(x) & 0xffff0000u); }

INLINE Words pair_up_halves(const BFloat16* x, const BFloat16* y) {
    const __m512i low = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return interleave(_mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y)), 1));
}

// Rows of a tile, or their negatives, into lanes, neighbouring columns paired: (pairs × V·LANES), zeros behind the last
// column.
static void rows_to_pairs(const View& view, const Rows& rows, int64_t batch, int64_t columns, int64_t pairs,
                          bool negative, Pair* to) {
    const int64_t width = rows.vectors * LANES;
    for (int64_t v = 0; v < rows.vectors; v++)
        for (int64_t pair = 0; pair < pairs; pair += LANES) {
            Floats square[LANES];
            for (int r = 0; r < LANES; r++) {
                const int64_t lane = v * LANES + r;
                Words word = {};
                const int64_t left = smaller(2 * LANES, columns - 2 * pair);
                if (lane < rows.count && left > 0) {
                    const BFloat16* from = view.at<BFloat16>(batch, rows.head[lane], rows.row[lane]) + 2 * pair;
                    memcpy(&word, from, static_cast<size_t>(left) * sizeof(BFloat16));
                }
                square[r] = reinterpret_cast<Floats>(negative ? word ^ 0x80008000u : word);
            }
            transpose(square);
            for (int64_t r = 0; r < smaller(LANES, pairs - pair); r++)
                memcpy(to + (pair + r) * width + v * LANES, &square[r], sizeof(Floats));
        }
}

// Rows as they are, each padded with zeros to whole pairs, and rows of zeros up to `padded`.
static void copy_pairs(const View& view, int64_t batch, int64_t head, int64_t start, int64_t count, int64_t columns,
                       int64_t pairs, int64_t padded, Pair* to) {
    const size_t bytes = static_cast<size_t>(columns) * sizeof(BFloat16);
    for (int64_t i = 0; i < count; i++, to += pairs) {
        memcpy(to, view.at<BFloat16>(batch, head, start + i), bytes);
        memset(reinterpret_cast<char*>(to) + bytes, 0, static_cast<size_t>(pairs) * sizeof(Pair) - bytes);
    }
    memset(to, 0, static_cast<size_t>((padded - count) * pairs) * sizeof(Pair));
}

// The columns d … d + 15 of rows i and i + 1, paired; zeros where there is no such row or column.
INLINE Floats pair_rows(const View& view, int64_t batch, int64_t head, int64_t start, int64_t i, int64_t count,
                        int64_t d, int64_t columns) {
    Floats low = {}, high = {};
    if (i < count && d < columns) low = load_some(view.at<BFloat16>(batch, head, start + i) + d, columns - d);
    if (i + 1 < count && d < columns) high = load_some(view.at<BFloat16>(batch, head, start + i + 1) + d, columns - d);
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(low) >> 16 | reinterpret_cast<Words>(high));
}

// Rows into columns, neighbouring rows paired: (columns, rounded up to `height`, × stride pairs).
static void transpose_pairs(const View& view, int64_t batch, int64_t head, int64_t start, int64_t count,
                            int64_t columns, int64_t height, int64_t stride, int64_t padded, Pair* to) {
    for (int64_t i = 0; i < padded; i += 2 * LANES)
        for (int64_t d = 0; d < height; d += LANES) {
            Floats square[LANES];
            if (i + 2 * LANES <= count && d + LANES <= columns) {
                for (int r = 0; r < LANES; r++) {
                    const BFloat16* from = view.at<BFloat16>(batch, head, start + i + 2 * r) + d;
                    square[r] = reinterpret_cast<Floats>(pair_up_halves(from, from + view.row));
                }
            } else {
                for (int r = 0; r < LANES; r++)
                    square[r] = pair_rows(view, batch, head, start, i + 2 * r, count, d, columns);
            }
            transpose(square);
            for (int64_t r = 0; r < smaller(LANES, height - d); r++)
                memcpy(to + (d + r) * stride + i / 2, &square[r], sizeof(Floats));
        }
}

// What forward and backward share. A tile is ROW_VECTORS vectors of query rows, which lie in the lanes, so that softmax
// needs nothing but vertical operations and neither keys nor values have to be transposed; a block is BLOCK keys.

constexpr int TILE = LANES * ROW_VECTORS;
constexpr int BLOCK = 128;
constexpr int MOST_TILES = 16;  // of one task: they share the block's keys and values while these are in the cache
constexpr int GROUP = 8;       // keys that one Philox counter decides about; blocks are cut at multiples of it

// acc[t] += Σ_k a(t, k) · b[k]: STEP numbers times V vectors for each k, all sums in registers.
// a(t, k) is a[t·lda + k] if ALONG, else a[k·lda + t].
template <bool ALONG, int V>
INLINE void multiply(Floats (&acc)[STEP][V], const float* __restrict a, int64_t lda, const float* __restrict b,
                     int64_t ldb, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        Floats right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) right[v] = load(b + k * ldb + v * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++) {
            const float left = ALONG ? a[t * lda + k] : a[k * lda + t];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[t][v] += left * right[v];
        }
    }
}

// The query rows of a tile: whose they are and which columns they may see. Lanes without a row repeat the last one.
struct Rows {
    int64_t start, count, vectors;  // folded rows
    int32_t head[TILE], row[TILE], first[TILE], last[TILE];
    int64_t lowest_first, highest_first, lowest_last, highest_last;
    bool one_head;
};

static void describe_rows(const Problem& p, int64_t batch, int64_t kv_head, int64_t start, int64_t stop, Rows& rows) {
    rows.start = start;
    rows.count = smaller(TILE, stop - start);
    rows.vectors = (rows.count + LANES - 1) / LANES;
    rows.lowest_first = rows.lowest_last = INT32_MAX;
    rows.highest_first = rows.highest_last = 0;
    for (int64_t lane = 0; lane < rows.vectors * LANES; lane++) {
        const int64_t folded = start + smaller(lane, rows.count - 1), i = folded % p.rows;
        int64_t first = larger(0, i + p.low), last = smaller(p.stop, i + p.high + 1);
        if (p.first) {
            const int64_t place = batch * p.span_batch + i * p.span_row;
            first = larger(first, p.first[place]);
            last = smaller(last, p.last[place]);
        }
        last = larger(0, smaller(last, p.keys));
        first = smaller(first, last);
        rows.head[lane] = static_cast<int32_t>(kv_head * p.group() + folded / p.rows);
        rows.row[lane] = static_cast<int32_t>(i);
        rows.first[lane] = static_cast<int32_t>(first);
        rows.last[lane] = static_cast<int32_t>(last);
        if (first == last) {  // sees nothing, so it widens no range, but must be masked in every block
            rows.highest_first = INT32_MAX;
            rows.lowest_last = 0;
            continue;
        }
        rows.lowest_first = smaller(rows.lowest_first, first);
        rows.highest_first = larger(rows.highest_first, first);
        rows.lowest_last = smaller(rows.lowest_last, last);
        rows.highest_last = larger(rows.highest_last, last);
    }
    rows.one_head = rows.head[0] == rows.head[rows.count - 1];
}

// Copies rows of T into rows of floats of length `to_stride`, zeros behind their columns and below up to `padded`.
template <class T>
static void widen_rows(const T* from, int64_t from_stride, int64_t count, int64_t columns, float* to, int64_t to_stride,
                       int64_t padded) {
    for (int64_t i = 0; i < count; i++, from += from_stride, to += to_stride) {
        int64_t j = 0;
        for (; j + LANES <= columns; j += LANES) store(to + j, load_wide(from + j));
        for (; j < columns; j++) to[j] = widen(from[j]);
        for (; j < to_stride; j++) to[j] = 0;
    }
    memset(to, 0, static_cast<size_t>((padded - count) * to_stride) * sizeof(float));
}

template <class T>
INLINE void fetch(const T* from, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + j);
}

// (Inlined by force: gcc drops calls of functions that do nothing but prefetch.)
// Fetches one of `parts` equal parts of a block's keys and values, while a tile is at work on the block before.
template <class T>
INLINE void fetch_part(const Problem& p, int64_t batch, int64_t kv_head, int64_t block, int64_t part, int64_t parts) {
    const int64_t stop = smaller(block + BLOCK * (part + 1) / parts, p.keys);
    for (int64_t j = block + BLOCK * part / parts; j < stop; j++) {
        fetch(p.key.at<T>(batch, kv_head, j), p.dim);
        fetch(p.value.at<T>(batch, kv_head, j), p.value_dim);
    }
}

// Rows into lanes: the (TILE rows × columns) of a tile to (columns × V·LANES), times a factor; no row, no number.
template <class T>
static void rows_to_lanes(const View& view, const Rows& rows, int64_t batch, int64_t columns, float factor, float* to) {
    const int64_t width = rows.vectors * LANES;
    for (int64_t v = 0; v < rows.vectors; v++)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            for (int r = 0; r < LANES; r++) {
                const int64_t lane = v * LANES + r;
                square[r] = Floats{};
                if (lane < rows.count)
                    square[r] = factor * load_some(view.at<T>(batch, rows.head[lane], rows.row[lane]) + j, columns - j);
            }
            transpose(square);
            const int64_t count = smaller(LANES, columns - j);
            for (int64_t r = 0; r < count; r++) store(to + (j + r) * width + v * LANES, square[r]);
        }
}

// The way back, each row times its factor.
template <class T>
static void lanes_to_rows(const float* from, const Rows& rows, int64_t batch, int64_t columns, const float* factors,
                          const View& view) {
    const int64_t width = rows.vectors * LANES;
    for (int64_t v = 0; v < rows.vectors; v++)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            const int64_t count = smaller(LANES, columns - j);
            for (int64_t r = 0; r < LANES; r++)
                square[r] = r < count ? load(from + (j + r) * width + v * LANES) : Floats{};
            transpose(square);
            for (int64_t r = 0; r < LANES; r++) {
                const int64_t lane = v * LANES + r;
                if (lane >= rows.count) break;
                store_some(view.at<T>(batch, rows.head[lane], rows.row[lane]) + j, square[r] * factors[lane], count);
            }
        }
}

enum class Sight { nothing, some, everything };

// One row of the masks: what they add to `LANES` scores from column j on, −∞ where hidden.
INLINE Floats mask_row(const Problem& p, int64_t batch, int64_t head, int64_t row, int64_t j, int64_t count) {
    Floats added = {};
    if (p.bias.data) {
        const float* from = p.bias.at<float>(batch, head, row) + j * p.bias.column;
        if (p.bias.column == 1 && count == LANES) {
            added = load(from);
        } else {
            for (int64_t lane = 0; lane < count; lane++) added[lane] = from[lane * p.bias.column];
        }
        added *= LOG2E;
    }
    if (p.visible.data) {
        typedef uint8_t Bytes __attribute__((vector_size(LANES)));
        Bytes seen = {};
        const uint8_t* from = p.visible.at<uint8_t>(batch, head, row) + j * p.visible.column;
        if (p.visible.column == 1 && count == LANES) {
            memcpy(&seen, from, LANES);
        } else {
            for (int64_t lane = 0; lane < count; lane++) seen[lane] = from[lane * p.visible.column];
        }
        typedef uint16_t Pairs __attribute__((vector_size(LANES * 2)));  // in two steps, for each is one instruction
        added = __builtin_convertvector(__builtin_convertvector(seen, Pairs), Ints) != 0 ? added : splat(-INFINITY);
    }
    return added;
}

// A hidden score is −∞ even if it was NaN: others may see that key, this row does not.
INLINE Floats add_mask(Floats score, Floats added) { return added == splat(-INFINITY) ? added : score + added; }

// Whether marks that are the same for every row show all keys of a range, or none, or neither.
static Sight shared_marks(const Problem& p, int64_t batch, int64_t head, int64_t start, int64_t stop) {
    const uint8_t* marks = p.visible.at<uint8_t>(batch, head, 0);
    int64_t seen = 0;
    for (int64_t j = start; j < stop; j++) seen += marks[j * p.visible.column] != 0;
    return seen == 0 ? Sight::nothing : seen == stop - start ? Sight::everything : Sight::some;
}

// Fetches what the masks say of a tile, whose rows lie too far from each other for the processor to foresee them.
INLINE void fetch_masks(const Problem& p, const Rows& rows, int64_t batch, int64_t start) {
    if (!p.bias.data && !p.visible.data) return;
    const int64_t stop = smaller(start + BLOCK, p.keys);
    for (int64_t lane = 0; lane < rows.count; lane++) {
        if (p.bias.data && p.bias.row && p.bias.column == 1)
            for (int64_t j = start; j < stop; j += 16)
                __builtin_prefetch(p.bias.at<float>(batch, rows.head[lane], rows.row[lane]) + j, 0, 2);
        if (p.visible.data && p.visible.row && p.visible.column == 1)
            for (int64_t j = start; j < stop; j += 64)
                __builtin_prefetch(p.visible.at<uint8_t>(batch, rows.head[lane], rows.row[lane]) + j, 0, 2);
    }
}

// What a tile sees of the keys [start, stop): if some, extra (keys × V·LANES) receives what is added to the scores.
template <int V>
static Sight look(const Problem& p, const Rows& rows, int64_t batch, int64_t start, int64_t stop, float* extra) {
    const bool within = rows.highest_first <= start && rows.lowest_last >= stop;
    bool dense = p.bias.data || p.visible.data;
    if (p.visible.data && p.visible.row == 0 && (rows.one_head || p.visible.head == 0)) {
        const Sight sight = shared_marks(p, batch, rows.head[0], start, smaller(stop, p.keys));
        if (sight == Sight::nothing) return sight;
        if (sight == Sight::everything && !p.bias.data) dense = false;
    }
    if (!dense && within) return Sight::everything;
    Floats best = splat(-INFINITY);
    for (int v = 0; v < V; v++) {
        Ints first, last;
        memcpy(&first, rows.first + v * LANES, sizeof first);
        memcpy(&last, rows.last + v * LANES, sizeof last);
        for (int64_t j = start; j < stop; j += LANES) {
            Floats square[LANES];
            for (int r = 0; r < LANES; r++) {
                const int lane = v * LANES + r;
                square[r] = dense ? mask_row(p, batch, rows.head[lane], rows.row[lane], j,
                                             larger(0, smaller(LANES, p.keys - j)))
                                  : Floats{};
            }
            if (dense) transpose(square);
            const int64_t count = smaller(LANES, stop - j);
            for (int64_t r = 0; r < count; r++) {
                const Ints key = splat(static_cast<int32_t>(j + r));
                const Floats added = ((key >= first) & (key < last)) ? square[r] : splat(-INFINITY);
                best = larger(added, best);
                store(extra + ((j - start + r) * V + v) * LANES, added);
            }
        }
    }
    return peak(best) == -INFINITY ? Sight::nothing : Sight::some;
}

// Which of GROUP keys from `key` on are kept for the rows of one vector: all ones or zero.
INLINE void draw_kept(const Problem& p, const Rows& rows, int64_t batch, int v, int64_t key, Ints (&kept)[GROUP]) {
    Words counter[4] = {};
    Ints head, row;
    memcpy(&head, rows.head + v * LANES, sizeof head);
    memcpy(&row, rows.row + v * LANES, sizeof row);
    counter[0] += static_cast<uint32_t>(key / GROUP);
    counter[1] = reinterpret_cast<Words>(row);
    counter[2] = reinterpret_cast<Words>(head) + static_cast<uint32_t>(batch * p.heads);
    philox(counter, p.seed);
    for (int word = 0; word < 4; word++) {
        kept[2 * word] = (counter[word] & 0xffffu) >= p.drop_below;
        kept[2 * word + 1] = (counter[word] >> 16) >= p.drop_below;
    }
}

INLINE Floats only_where(Ints kept, Floats x) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & kept); }

// The part of a block that a tile sees anything of, cut at multiples of GROUP.
INLINE void trim(const Rows& rows, int64_t& start, int64_t& stop) {
    start = larger(start, rows.lowest_first / GROUP * GROUP);
    stop = smaller(stop, round_up(rows.highest_last, GROUP));
}

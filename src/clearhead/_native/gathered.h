// The forward pass of selected keys (`Problem::selected`). A row has a list of the keys it sees, in order and each once,
// which also leaves out what ranges and masks hide. Its keys and values are read where they lie.
//
// Rows of random keys read every key of a head again. So where some rows together read most keys, a task goes by blocks of
// keys that fit the cache: first all its rows against the first block, then against the next.
#pragma once
#include "decode.h"

namespace clearhead::ISA {

constexpr int64_t GATHERED_BYTES = 512 * 1024;        // keys and values of a block
constexpr int64_t GATHERED_STATE = 512 * 1024;        // floats of the rows of a task: queries and outputs
constexpr int64_t GATHERED_LISTS = 1024 * 1024;       // numbers in their lists
constexpr int64_t MOST_GATHERED_ROWS = 256;
constexpr int64_t FEWEST_READS = 4;  // of each key by the rows of a task, from which blocks pay

// Rows of keys, or values, by their numbers. `next` are the numbers that are read after the chunk; of R passes over the
// chunk each fetches some of them.
template <class T>
struct Listed {
    const T* first;
    int64_t stride;
    const int32_t *list, *next;
    int64_t place, passes;

    INLINE_METHOD const T* at(int64_t t) const { return first + list[t] * stride; }
    INLINE_METHOD void fetch_later(int64_t t, int64_t columns) const {
        if ((place + t) % passes == 0) fetch(first + next[(place + t) / passes] * stride, columns);
    }
    INLINE_METHOD Listed from(int64_t t) const { return {first, stride, list + t, next, place + t, passes}; }
};

// Numbers of rows, and of keys of a block, that a task computes together.
struct GatheredSizes {
    int64_t rows, keys;
};

static int64_t keys_in_cache(const Problem& p) { return GATHERED_BYTES / larger(1, (p.dim + p.value_dim) * p.bytes()) + 1; }

static GatheredSizes gathered_sizes(const Problem& p) {
    const int64_t most = larger(1, p.most_selected());
    const int64_t state = p.heads_together() * (lanes_up(p.dim) + lanes_up(p.value_dim) + 2);
    const int64_t fitting = smaller(GATHERED_STATE / state, GATHERED_LISTS / most);
    const int64_t rows = larger(1, smaller(MOST_GATHERED_ROWS, fitting));
    if (rows * most < FEWEST_READS * p.keys) return {smaller(rows, 16), p.keys};
    return {rows, smaller(keys_in_cache(p), p.keys)};
}

[[maybe_unused]] static int64_t gathered_rows(const Problem& p) { return gathered_sizes(p).rows; }

// Of a row: the maxima (in units of log 2) and sums of its heads, and their unnormalised outputs.
static int64_t gathered_partial(const Problem& p) { return p.heads_together() * (2 + lanes_up(p.value_dim)); }

// Bits for the keys of a row. The list is behind it, padded so that what is fetched ahead can be read.
static int64_t words_of(const Problem& p) { return p.keys / 64 + 1; }
static int64_t list_size(const Problem& p) { return round_up(p.most_selected() + CHUNK + 1, 16); }

[[maybe_unused]] static int64_t gathered_scratch(const Problem& p) {
    const int64_t rows = gathered_sizes(p).rows, query = p.heads_together() * lanes_up(p.dim);
    return 2 * words_of(p) + rows * (list_size(p) + 4 + query + gathered_partial(p)) + 6 * 16;
}

// Whether no mask hides the key.
INLINE bool shows(const Problem& p, int64_t batch, int64_t head, int64_t row, int64_t key) {
    if (p.visible.data && !p.visible.at<uint8_t>(batch, head, row)[key * p.visible.column]) return false;
    return !p.bias.data || p.bias.at<float>(batch, head, row)[key * p.bias.column] != -INFINITY;
}

// Writes the keys that a row sees, and copies of the last one behind them. `bits` are zero before and after. Returns their
// number.
static int64_t list_keys(const Problem& p, int64_t batch, int64_t head, int64_t row, uint64_t* bits, int32_t* list) {
    const auto [first, last] = p.range(batch, row);
    const int32_t* from = p.selected.at<int32_t>(batch, head * p.selected_heads / p.heads, row);
    for (int64_t n = 0; n < p.selected_count; n++) {
        if (from[n] < 0) continue;
        const int64_t start = larger(first, from[n] * p.selected_block);
        const int64_t stop = smaller(last, (from[n] + int64_t(1)) * p.selected_block);
        if (p.selected_block == 1) {
            if (start < stop) bits[start / 64] |= uint64_t(1) << start % 64;
            continue;
        }
        for (int64_t key = start, count; key < stop; key += count) {
            count = smaller(64 - key % 64, stop - key);
            bits[key / 64] |= (~uint64_t(0) >> (64 - count)) << key % 64;
        }
    }
    const bool masked = p.visible.data || p.bias.data;
    int64_t count = 0;
    for (int64_t word = first / 64; word * 64 < last; word++) {
        for (uint64_t rest = bits[word]; rest; rest &= rest - 1) {
            const int64_t key = word * 64 + __builtin_ctzll(rest);
            list[count] = static_cast<int32_t>(key);
            count += !masked || shows(p, batch, head, row, key);
        }
        bits[word] = 0;
    }
    const int32_t repeated = count ? list[count - 1] : 0;
    for (int64_t n = 0; n <= CHUNK; n++) list[count + n] = repeated;
    return count;
}

// The first of a list's keys that is not below a number.
INLINE const int32_t* first_from(const int32_t* start, const int32_t* stop, int64_t number) {
    while (start < stop) {
        const int32_t* middle = start + (stop - start) / 2;
        if (*middle < number) start = middle + 1;
        else stop = middle;
    }
    return start;
}

// Which of some keys of a row keep their weights in dropout, one bit for each.
INLINE uint32_t undropped_keys(const Problem& p, int64_t batch, int64_t head, int64_t row, const int32_t* list) {
    const Words keys = reinterpret_cast<Words>(load(list)) + static_cast<uint32_t>(p.offset.column);
    Words counter[4] = {};
    counter[0] = keys >> 3;
    counter[1] += static_cast<uint32_t>(p.offset.row + row);
    counter[2] += static_cast<uint32_t>((p.offset.item + batch) * p.offset.num_heads + p.offset.head + head);
    philox(counter, p.seed);
    const Words which = keys & 7u;
    Words drawn = {};
    for (uint32_t word = 0; word < 4; word++) drawn = (which >> 1) == word ? counter[word] : drawn;
    drawn = (which & 1u) != 0 ? drawn >> 16 : drawn & 0xffffu;
    return bits(drawn >= p.drop_below);
}

// Zeros the weights of some keys of a row that dropout drops.
INLINE void drop_weights(const Problem& p, int64_t batch, int64_t head, int64_t row, const int32_t* list, int64_t count,
                         float* weights) {
    for (int64_t j = 0; j < count; j += LANES) {
        const uint32_t undropped = undropped_keys(p, batch, head, row, list + j);
        for (int64_t t = 0; t < smaller(LANES, count - j); t++)
            if (!(undropped >> t & 1u)) weights[j + t] = 0;
    }
}

// The bias of a row for LANES keys, in units of log 2.
INLINE Floats bias_of_keys(const Problem& p, int64_t batch, int64_t head, int64_t row, const int32_t* list, int64_t count) {
    Floats added = {};
    const float* from = p.bias.at<float>(batch, head, row);
    for (int64_t lane = 0; lane < count; lane++) added[lane] = from[list[lane] * p.bias.column];
    return in_units_of_log2(added);
}

// Scores (units of log 2) of R heads of a row for some keys, −∞ behind them, and the row maxima.
template <class T, int R>
INLINE void score_listed(const Problem& p, int64_t batch, int64_t head, int64_t row, const Listed<T>& keys, int64_t count,
                         const float* query, float (*scores)[CHUNK], float (&best)[R]) {
    Ints lane;
    for (int n = 0; n < LANES; n++) lane[n] = n;
    Floats row_maxima[R];
    for (int r = 0; r < R; r++) row_maxima[r] = splat(-INFINITY);
    for (int64_t j = 0; j < count; j += LANES) {
        const int64_t present = smaller(LANES, count - j);
        Floats dot[R];
        dots(query, lanes_up(p.dim), keys.from(j), p.dim, present, dot);
        for (int r = 0; r < R; r++) {
            Floats x = in_units_of_log2(p, dot[r]);
            if (p.bias.data) x = rounded(x) + bias_of_keys(p, batch, head + r, row, keys.list + j, present);
            x = lane < splat(static_cast<int32_t>(present)) ? x : splat(-INFINITY);
            row_maxima[r] = larger(x, row_maxima[r]);
            store(scores[r] + j, x);
        }
    }
    for (int r = 0; r < R; r++) best[r] = largest_lane(row_maxima[r]);
}

// A row of a task: the heads that share its list, from `head` on, and their numbers so far.
struct GatheredRow {
    int64_t batch, head, row, heads;
    const float* query;
    float *row_maxima, *totals, *output;
};

template <class T, int R>
static void add_chunk(const Problem& p, const GatheredRow& rows, int64_t first, const int32_t* list, int64_t count,
                      int64_t pass, int64_t passes) {
    const int64_t b = rows.batch, head = rows.head + first, h = head / p.group(), width = lanes_up(p.value_dim);
    const Listed<T> keys = {p.key.at<T>(b, h, 0), p.key.row, list, list + count, pass * CHUNK, passes};
    const Listed<T> values = {p.value.at<T>(b, h, 0), p.value.row, list, list + count, pass * CHUNK, passes};
    float scores[R][CHUNK], best[R], *output = rows.output + first * width;
    score_listed<T, R>(p, b, head, rows.row, keys, count, rows.query + first * lanes_up(p.dim), scores, best);
    weigh_chunk<R>(scores, best, count, rows.row_maxima + first, rows.totals + first, [&](int r, float factor) {
        for (int64_t d = 0; d < width; d += LANES) {
            float* place = output + r * width + d;
            store(place, load(place) * factor);
        }
    });
    for (int r = 0; p.drop_below && r < R; r++) drop_weights(p, b, head + r, rows.row, list, count, scores[r]);
    mix_all<R>(scores, values, p.value_dim, count, output, width);
}

// Adds some keys to a row, chunk by chunk.
template <class T>
static void add_keys(const Problem& p, const GatheredRow& row, const int32_t* list, int64_t count) {
    const int64_t passes = row.heads / TOGETHER + (row.heads % TOGETHER > 1) + row.heads % 2;
    const int64_t step = round_up(divide_up(count, larger(1, divide_up(count, CHUNK))), LANES);
    for (int64_t start = 0; start < count; start += step) {
        const int64_t present = smaller(step, count - start);
        int64_t head = 0, pass = 0;
        const auto add = [&](auto together) {
            add_chunk<T, together>(p, row, head, list + start, present, pass++, passes);
            head += together;
        };
        while (row.heads - head >= TOGETHER) add(Constant<TOGETHER>());
        if (row.heads - head >= 2) add(Constant<2>());
        if (row.heads > head) add(Constant<1>());
    }
}

// Writes output and lse of the heads of a row, from `count` partial results.
template <class T>
static void merge_gathered(const Problem& p, int64_t batch, int64_t head, int64_t row, const float* partials,
                           int64_t count) {
    const int64_t heads = p.heads_together(), width = lanes_up(p.value_dim), size = gathered_partial(p);
    for (int64_t n = 0; n < heads; n++) {
        float top = LOWEST, total = 0;
        for (int64_t part = 0; part < count; part++) top = partials[part * size + n] > top ? partials[part * size + n] : top;
        const auto scale = [&](int64_t part) { return exp2(splat(partials[part * size + n] - top))[0]; };
        for (int64_t part = 0; part < count; part++) total += scale(part) * partials[part * size + heads + n];
        const float factor = finish_row(p, batch, head + n, row, top, total);
        for (int64_t d = 0; d < p.value_dim; d += LANES) {
            Floats x = {};
            for (int64_t part = 0; part < count; part++)
                x += scale(part) * load(partials + part * size + 2 * heads + n * width + d);
            if (p.wide_output)
                store_some(p.output.at<float>(batch, head + n, row) + d, x * factor, p.value_dim - d);
            else
                store_some(p.output.at<T>(batch, head + n, row) + d, x * factor, p.value_dim - d);
        }
    }
}

// The rows of a task, as many as `gathered_rows` at most, whose first head is task.kv_head. Results of some part of the
// lists go to `partials`, if it is not null.
template <class T>
static void gather(const Problem& p, const Task& task, float* partials, float* scratch) {
    const int64_t b = task.batch, heads = p.heads_together(), width = lanes_up(p.dim), size = gathered_partial(p);
    const int64_t rows = task.row_stop - task.row_start, block = gathered_sizes(p).keys;
    uint64_t* bits = reinterpret_cast<uint64_t*>(take(scratch, 2 * words_of(p)));
    int32_t* lists = reinterpret_cast<int32_t*>(take(scratch, rows * list_size(p)));
    int32_t* ends = reinterpret_cast<int32_t*>(take(scratch, 2 * rows));
    float *queries = take(scratch, rows * heads * width), *states = partials ? partials : take(scratch, rows * size);
    memset(bits, 0, static_cast<size_t>(words_of(p)) * sizeof *bits);
    memset(states, 0, static_cast<size_t>(rows * size) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = task.row_start + r;
        const int64_t count = list_keys(p, b, task.kv_head, row, bits, lists + r * list_size(p));
        ends[2 * r] = static_cast<int32_t>(count * task.key_start / task.key_stop);
        ends[2 * r + 1] = static_cast<int32_t>(count * (task.key_start + 1) / task.key_stop);
        for (int64_t n = 0; n < heads; n++) {
            states[r * size + n] = LOWEST;
            widen_rows(p.query.at<T>(b, task.kv_head + n, row), 0, 1, p.dim, queries + (r * heads + n) * width, width, 1);
        }
    }
    // One row waits for memory: all it reads is on its way before it begins.
    const int64_t kv_head = task.kv_head / p.group(), fetched = rows == 1 ? smaller(ends[1], ends[0] + keys_in_cache(p)) : 0;
    for (int64_t n = ends[0]; n < fetched; n++) {
        fetch(p.key.at<T>(b, kv_head, lists[n]), p.dim);
        fetch(p.value.at<T>(b, kv_head, lists[n]), p.value_dim);
    }
    for (int64_t stop = block; stop - block < p.keys; stop += block)
        for (int64_t r = 0; r < rows; r++) {
            const int32_t *list = lists + r * list_size(p), *start = list + ends[2 * r], *end = list + ends[2 * r + 1];
            if (stop < p.keys) end = first_from(start, end, stop);
            float* state = states + r * size;
            add_keys<T>(p, {b, task.kv_head, task.row_start + r, heads, queries + r * heads * width, state, state + heads,
                            state + 2 * heads}, start, end - start);
            ends[2 * r] = static_cast<int32_t>(end - list);
        }
    for (int64_t r = 0; !partials && r < rows; r++)
        merge_gathered<T>(p, b, task.kv_head, task.row_start + r, states + r * size, 1);
}

}  // namespace clearhead::ISA

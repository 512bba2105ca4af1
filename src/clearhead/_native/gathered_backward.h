// The backward pass of selected keys, row by row, which recomputes the weights from the log-sum-exp as `backward.h` does.
#pragma once
#include "backward.h"
#include "gathered.h"

namespace clearhead::ISA {

// A row in the backward pass: its keys, and of each head the query, the output's gradient, and for each key the weight,
// ds and the slope of the soft-cap, `capacity` apart.
struct GatheredBack {
    int64_t batch, head, row, heads, kv_head, capacity;
    int32_t* list;
    int64_t count;
    float *query, *gradient, *weights, *ds, *slopes, *query_gradient;
    uint64_t* bits;
};

[[maybe_unused]] static int64_t gathered_back_scratch(const Problem& p) {
    const int64_t heads = p.heads_together(), of_keys = 3 * list_size(p), of_rows = 2 * lanes_up(p.dim) + lanes_up(p.value_dim);
    return 2 * words_of(p) + list_size(p) + heads * (of_keys + of_rows) + 8 * 16;
}

// Products of R heads with all listed rows: to_r[key] = x_r · row.
template <class T, int R>
static void multiply_listed(const View& view, const GatheredBack& row, int64_t columns, int64_t first, const float* x,
                            float* to) {
    const int64_t width = lanes_up(columns);
    for (int64_t j = 0; j < row.count; j += LANES) {
        const int64_t present = smaller(LANES, row.count - j), ahead = smaller(CHUNK, row.count - j);
        const Listed<T> keys = {view.at<T>(row.batch, row.kv_head, 0), view.row, row.list + j, row.list + j + ahead, 0, 1};
        Floats dot[R];
        dots(x + first * width, width, keys, columns, present, dot);
        for (int r = 0; r < R; r++) store(to + (first + r) * row.capacity + j, dot[r]);
    }
}

// Calls work(number of heads, as a constant, the first of them) for all heads of a row.
template <class Work>
INLINE void by_heads(int64_t heads, const Work& work) {
    int64_t head = 0;
    for (; heads - head >= TOGETHER; head += TOGETHER) work(Constant<TOGETHER>(), head);
    for (; heads - head >= 2; head += 2) work(Constant<2>(), head);
    if (heads > head) work(Constant<1>(), head);
}

// Turns the products of one head into weights after dropout and ds before the soft-cap, and adds ds of the heavy key.
template <class T>
static void differentiate_listed(const Problem& p, const GatheredBack& row, int64_t n) {
    const int64_t b = row.batch, head = row.head + n, place = p.row_place(b, head, row.row);
    float *weights = row.weights + n * row.capacity, *ds = row.ds + n * row.capacity, *slopes = row.slopes + n * row.capacity;
    const double delta = dot(p.exact_output.at<float>(b, head, row.row), p.output_gradient.at<T>(b, head, row.row), p.value_dim);
    const float correction = static_cast<float>(delta - (p.lse_gradient ? p.lse_gradient[place] : 0));
    p.correction[place] = correction;
    // The lowest lse is that of scores that are all the lowest number: their weights are 0 here, as in `correct`.
    const double exact = p.lse[place] * LOG2_OF_E;
    const bool usual = p.lse[place] != -INFINITY && p.lse[place] != LOWEST;
    const float lse = usual ? static_cast<float>(exact) : p.lse[place] == LOWEST ? -LOWEST : 0;
    const float missing = usual ? exp2(splat(static_cast<float>(lse - exact)))[0] : 0;
    double light_sum = 0;
    int64_t heavy = -1;
    for (int64_t j = 0; j < row.count; j += LANES) {
        const int64_t present = smaller(LANES, row.count - j);
        Floats x = load(weights + j) * (p.softcap != 0 ? p.scale / p.softcap : p.scale * LOG2E);
        if (p.softcap != 0) {
            x = tanh(x);
            store(slopes + j, 1.f - x * x);
            x *= p.softcap * LOG2E;
        }
        if (p.bias.data) x = rounded(x) + bias_of_keys(p, b, head, row.row, row.list + j, present);
        const Floats weight = exp2(rounded(x) - lse) * missing;
        store(weights + j, weight);
        const uint32_t undropped = p.drop_below ? undropped_keys(p, b, head, row.row, row.list + j) : ~0u;
        for (int64_t t = j; t < j + present; t++) {
            const bool kept = undropped >> (t - j) & 1u;
            const float one = weights[t], of_score = one * ((kept ? ds[t] : 0) - correction);
            if (!kept) weights[t] = 0;
            ds[t] = of_score;
            if (sizeof(T) == sizeof(float) && one > HEAVY_WEIGHT) heavy = t;
            else light_sum += of_score;
        }
    }
    if (heavy >= 0) ds[heavy] = static_cast<float>(p.sum_of_score_gradients(b, head, row.row) - light_sum);
    for (int64_t j = 0; p.softcap != 0 && j < row.count; j += LANES) store(ds + j, load(ds + j) * load(slopes + j));
}

// sums[key] += Σ_n factor_n[key] · x_n, for all listed keys.
static void add_to_keys(const GatheredBack& row, const float* factors, const float* x, int64_t width, float* sums) {
    for (int64_t t = 0; t < row.count; t++) {
        float* to = sums + row.list[t] * width;
        fetch(sums + row.list[smaller(t + 8, row.count - 1)] * width, width);
        for (int64_t d = 0; d < width; d += LANES) {
            Floats sum = {};
            for (int64_t n = 0; n < row.heads; n++) sum += factors[n * row.capacity + t] * load(x + n * width + d);
            store(to + d, load(to + d) + sum);
        }
    }
}

// dq of a head: Σ_key ds · key.
template <class T>
static void write_query_gradient(const Problem& p, const GatheredBack& row, int64_t n) {
    const int64_t width = lanes_up(p.dim);
    memset(row.query_gradient, 0, static_cast<size_t>(width) * sizeof(float));
    float some[1][CHUNK];
    for (int64_t start = 0; start < row.count; start += CHUNK) {
        const int64_t present = smaller(CHUNK, row.count - start);
        memcpy(some[0], row.ds + n * row.capacity + start, static_cast<size_t>(present) * sizeof(float));
        const int32_t* list = row.list + start;
        const Listed<T> keys = {p.key.at<T>(row.batch, row.kv_head, 0), p.key.row, list, list + present, 0, 1};
        mix_all<1>(some, keys, p.dim, present, row.query_gradient, width);
    }
    T* to = p.query_gradient.at<T>(row.batch, row.head + n, row.row);
    for (int64_t d = 0; d < p.dim; d += LANES) store_some(to + d, load(row.query_gradient + d) * p.scale, p.dim - d);
}

template <class T>
static void differentiate_row(const Problem& p, GatheredBack& row, float* sums) {
    const int64_t b = row.batch, width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    row.count = list_keys(p, b, row.head, row.row, row.bits, row.list);
    for (int64_t n = 0; n < row.heads; n++) {
        float* gradient = row.gradient + n * value_width;
        widen_rows(p.query.at<T>(b, row.head + n, row.row), 0, 1, p.dim, row.query + n * width, width, 1);
        widen_rows(p.output_gradient.at<T>(b, row.head + n, row.row), 0, 1, p.value_dim, gradient, value_width, 1);
        for (int64_t d = 0; d < value_width; d += LANES) store(gradient + d, load(gradient + d) * p.kept_factor);
    }
    by_heads(row.heads, [&](auto together, int64_t n) { multiply_listed<T, together>(p.key, row, p.dim, n, row.query, row.weights); });
    by_heads(row.heads, [&](auto together, int64_t n) {
        multiply_listed<T, together>(p.value, row, p.value_dim, n, row.gradient, row.ds);
    });
    for (int64_t n = 0; n < row.heads; n++) {
        differentiate_listed<T>(p, row, n);
        write_query_gradient<T>(p, row, n);
    }
    add_to_keys(row, row.ds, row.query, width, sums);
    add_to_keys(row, row.weights, row.gradient, value_width, sums + keys_summed(p) * width);
}

// Some rows of all heads of the key/value head `task.kv_head`.
template <class T>
static void gather_back(const Problem& p, const Task& task, float* sums, float* scratch) {
    const int64_t heads = p.heads_together(), capacity = list_size(p), group = p.group();
    GatheredBack row = {};
    row.batch = task.batch, row.heads = heads, row.kv_head = task.kv_head, row.capacity = capacity;
    row.bits = reinterpret_cast<uint64_t*>(take(scratch, 2 * words_of(p)));
    row.list = reinterpret_cast<int32_t*>(take(scratch, capacity));
    row.query = take(scratch, heads * lanes_up(p.dim)), row.gradient = take(scratch, heads * lanes_up(p.value_dim));
    row.weights = take(scratch, heads * capacity), row.ds = take(scratch, heads * capacity);
    row.slopes = take(scratch, heads * capacity), row.query_gradient = take(scratch, lanes_up(p.dim));
    memset(row.bits, 0, static_cast<size_t>(words_of(p)) * sizeof *row.bits);
    for (row.row = task.row_start; row.row < task.row_stop; row.row++)
        for (row.head = task.kv_head * group; row.head < (task.kv_head + 1) * group; row.head += heads)
            differentiate_row<T>(p, row, sums);
}

}  // namespace clearhead::ISA

// Statistics of the weights of selected keys, row by row of one query head: those of `statistics.h`, from lists.
#pragma once
#include "gathered_backward.h"
#include "statistics.h"

namespace clearhead::ISA {

// The keys of a row with their scores less the row maximum (in units of log 2), and weights.
struct ListedWeights {
    int64_t batch, head, row, count;
    const int32_t* list;
    float *scores, *weights;
    bool counted;

    // The place of a key in the list, or −1.
    int64_t find(int64_t key) const {
        const int32_t* place = first_from(list, list + count, key);
        return place < list + count && *place == key ? place - list : -1;
    }
};

[[maybe_unused]] static int64_t gathered_statistics_scratch(const Problem& p) {
    const int64_t of_keys = 4 * list_size(p);  // the list, scores in double precision, and weights
    return 2 * words_of(p) + of_keys + 2 * list_size(p) + lanes_up(p.dim) + lanes_up(p.value_dim) + 8 * 16;
}

// The score of a product, in units of log 2, before and with the bias. Returns the former, in `unit_of_raw`.
static double exact_score(const Problem& p, const ListedWeights& row, int64_t key, double product, double& score) {
    double raw = product * p.exact_scale * LOG2_OF_E;
    score = raw;
    if (p.softcap != 0) {
        raw = product * p.exact_scale / p.exact_softcap;
        score = ::tanh(raw) * p.exact_softcap * LOG2_OF_E;
    }
    if (p.bias.data)
        score += p.bias.at<float>(row.batch, row.head, row.row)[key * p.bias.column] * LOG2_OF_E;
    return raw;
}

// Scores of the listed keys, less the row maximum. Exact scores are those of products in double precision.
template <class T>
static RowSums score_row(const Problem& p, const Statistics& s, ListedWeights& row, const float* query, double* exact) {
    const int64_t kv_head = row.head / p.group();
    RowSums sums = {0, 0, -INFINITY, -INFINITY, static_cast<float>(row.count)};
    for (int64_t j = 0; j < row.count; j += LANES) {
        const int64_t present = smaller(LANES, row.count - j);
        const Listed<T> keys = {p.key.at<T>(row.batch, kv_head, 0), p.key.row, row.list + j, row.list + j + present, 0, 1};
        Floats products[1];
        if (!s.exact) dots(query, lanes_up(p.dim), keys, p.dim, present, products);
        for (int64_t t = 0; t < present; t++) {
            const double product = s.exact ? dot(query, keys.at(t), p.dim) : products[0][t];
            const double raw = exact_score(p, row, row.list[j + t], product, exact[j + t]);
            sums.raw_max = raw > sums.raw_max || raw != raw ? raw : sums.raw_max;
            sums.row_max = exact[j + t] > sums.row_max ? exact[j + t] : sums.row_max;
        }
    }
    const Floats lowest = splat(-127.f);
    for (int64_t j = 0; j < row.count; j += LANES) {
        for (int64_t t = j; t < j + LANES; t++)
            row.scores[t] = t < row.count ? static_cast<float>(exact[t] - sums.row_max) : -INFINITY;
        const Floats shifted = larger(lowest, load(row.scores + j));
        const Floats weights = exp2_within(shifted);
        store(row.weights + j, weights);
        for (int64_t t = 0; t < smaller(LANES, row.count - j); t++) {
            sums.sum += weights[t];
            sums.inner += static_cast<double>(weights[t]) * shifted[t];
        }
    }
    return sums;
}

// The largest weights, in falling order.
static void write_largest(const Problem& p, const Statistics& s, const ListedWeights& row) {
    const int64_t place = p.row_place(row.batch, row.head, row.row) * s.top;
    float* weights = s.top_weights + place;
    int64_t* keys = s.top_keys + place;
    int64_t found = 0;
    for (int64_t t = 0; t < row.count; t++) {
        if (found == s.top && !(row.scores[t] > row.scores[keys[found - 1]])) continue;
        int64_t rank = found < s.top ? found++ : found - 1;
        for (; rank > 0 && row.scores[keys[rank - 1]] < row.scores[t]; rank--) keys[rank] = keys[rank - 1];
        keys[rank] = t;
    }
    for (int64_t rank = 0; rank < s.top; rank++) {
        weights[rank] = rank < found ? row.weights[keys[rank]] : 0;
        keys[rank] = rank < found ? row.list[keys[rank]] : -1;
    }
}

static void write_positions(const Problem& p, const Statistics& s, const ListedWeights& row) {
    const int64_t place = p.row_place(row.batch, row.head, row.row), at = row.row + s.shift;
    if (s.sink) {
        const int32_t* keys = s.first_keys + (row.batch * p.heads + row.head) * s.sink_keys;
        double sum = 0;
        for (int64_t n = 0; n < s.sink_keys; n++)
            if (const int64_t t = row.find(keys[n]); t >= 0) sum += row.weights[t];
        s.sink[place] = static_cast<float>(sum);
    }
    for (int64_t n = 0; s.stripes && n < s.offset_count; n++) {
        const int64_t t = row.find(at + s.offsets[n]);
        s.stripes[place * s.offset_count + n] = t >= 0 ? row.weights[t] : -1;
    }
    double distance = 0;
    for (int64_t t = 0; s.distance && t < row.count; t++) distance += static_cast<double>(row.weights[t]) * fabs(at - double(row.list[t]));
    if (s.distance) s.distance[place] = static_cast<float>(distance);
}

// The weights of the keys of each mass: those of the row's label, from row + low to row + high.
static void write_masses(const Problem& p, const Statistics& s, const ListedWeights& row) {
    for (int64_t m = 0; m < s.mass_count; m++) {
        const int64_t item = m * p.batch + row.batch, *range = s.mass_ranges + 3 * m;
        const int32_t own = s.query_labels[item * p.rows + row.row], *labels = s.key_labels + item * p.keys;
        double sum = 0;
        for (int64_t t = 0; t < row.count; t++) {
            const int64_t key = row.list[t], away = key - row.row;
            if (away >= range[0] && away <= range[1] && (!range[2] || labels[key] == own)) sum += row.weights[t];
        }
        s.mass[m * p.batch * p.heads * p.rows + p.row_place(row.batch, row.head, row.row)] = static_cast<float>(sum);
    }
}

// Sums over rows, which counted rows add to, and matrices of weights.
static void add_weights(const Problem& p, const Statistics& s, const ListedWeights& row, const TaskSums& sums) {
    const bool averages = s.averages(p);
    float* to = s.weights.data ? s.weights.at<float>(row.batch, row.head, row.row) : nullptr;
    for (int64_t t = 0; to && t < row.count; t++) {
        if (averages) to[row.list[t]] += row.weights[t] / static_cast<float>(p.heads);
        else to[row.list[t]] = row.weights[t];
    }
    if (!row.counted) return;
    double* map = sums.map ? sums.map + s.map_row(p, row.row) * s.map_columns : nullptr;
    for (int64_t t = 0; t < row.count; t++) {
        const int64_t key = row.list[t];
        const float weight = row.weights[t];
        if (sums.received) {
            const float before = sums.received[key], after = before + weight, added = after - before;
            sums.received[key] = after, sums.lost[key] += (before - (after - added)) + (weight - added);
            sums.viewers[key] += 1;
        }
        if (!map) continue;
        double& cell = map[key * s.map_columns / p.keys];
        cell = !s.map_max ? cell + weight : weight > cell || weight != weight ? weight : cell;
    }
}

template <class T>
static void write_output(const Problem& p, const Statistics& s, const ListedWeights& row, float* output) {
    const int64_t width = lanes_up(p.value_dim);
    memset(output, 0, static_cast<size_t>(width) * sizeof(float));
    float some[1][CHUNK];
    for (int64_t start = 0; start < row.count; start += CHUNK) {
        const int64_t present = smaller(CHUNK, row.count - start);
        memcpy(some[0], row.weights + start, static_cast<size_t>(present) * sizeof(float));
        const int32_t* list = row.list + start;
        const Listed<T> values = {p.value.at<T>(row.batch, row.head / p.group(), 0), p.value.row, list, list + present, 0, 1};
        mix_all<1>(some, values, p.value_dim, present, output, width);
    }
    double squares = 0;
    for (int64_t d = 0; d < p.value_dim; d++) squares += static_cast<double>(output[d]) * output[d];
    if (s.norm) s.norm[p.row_place(row.batch, row.head, row.row)] = static_cast<float>(sqrt(squares));
    T* to = p.output.at<T>(row.batch, row.head, row.row);
    for (int64_t d = 0; d < p.value_dim; d += LANES) store_some(to + d, load(output + d), p.value_dim - d);
}

// The folded rows of a task, which are of one query head.
template <class T>
static void gather_statistics(const Problem& p, const Statistics& s, const Task& task, const TaskSums& sums, float* scratch) {
    uint64_t* bits = reinterpret_cast<uint64_t*>(take(scratch, 2 * words_of(p)));
    int32_t* list = reinterpret_cast<int32_t*>(take(scratch, list_size(p)));
    double* exact = reinterpret_cast<double*>(take(scratch, 2 * list_size(p)));
    ListedWeights row = {task.batch, task.kv_head * p.group() + task.row_start / p.rows, 0, 0, list,
                         take(scratch, list_size(p)), take(scratch, list_size(p)), true};
    float *query = take(scratch, lanes_up(p.dim)), *output = take(scratch, lanes_up(p.value_dim));
    memset(bits, 0, static_cast<size_t>(words_of(p)) * sizeof *bits);
    for (int64_t folded = task.row_start; folded < task.row_stop; folded++) {
        row.row = folded % p.rows;
        row.counted = !s.counted || s.counted[row.batch * p.rows + row.row];
        row.count = list_keys(p, row.batch, row.head, row.row, bits, list);
        widen_rows(p.query.at<T>(row.batch, row.head, row.row), 0, 1, p.dim, query, lanes_up(p.dim), 1);
        const float factor = finish_row_statistics(p, s, row.batch, row.head, row.row, score_row<T>(p, s, row, query, exact));
        for (int64_t j = 0; j < row.count; j += LANES) store(row.weights + j, load(row.weights + j) * factor);
        if (s.top) write_largest(p, s, row);
        write_positions(p, s, row);
        write_masses(p, s, row);
        add_weights(p, s, row, sums);
        if (p.output.data) write_output<T>(p, s, row, output);
    }
}

}  // namespace clearhead::ISA

// Attention whose bias comes from tables of queries and keys (`BucketTable`). A thread computes one head at a time: it
// multiplies the tables out, runs the pass on the head, and, in a backward pass, multiplies their gradients back. So memory
// holds the tables of one head for each thread.
#include <tuple>

#include "driver_shared.h"

namespace clearhead {
namespace {

constexpr int64_t TOKENS_AT_ONCE = 96;  // among whose buckets few are out of reach

int64_t padded(int64_t count) { return round_up(count, TABLE_STEP); }

// One head of a batch item, or of a sequence as a problem of its own.
struct Unit {
    Problem p;
    int64_t index, head;  // through the batch, and of the head
};

Unit unit_of(const Problem& all, int64_t item, int64_t head) {
    Unit unit = {all.sequences ? sequence_of(all, item, 1) : all, all.sequences ? head : item * all.heads + head, head};
    unit.p.threads = 1;
    return unit;
}

int64_t items_of(const Problem& p) { return p.sequences ? p.sequences : p.batch; }

// The most rows and the most keys of a unit.
std::pair<int64_t, int64_t> largest_sizes(const Problem& p) {
    if (!p.sequences) return {p.rows, p.keys};
    int64_t rows = 0, keys = 0;
    for (int64_t n = 0; n < p.sequences; n++) {
        rows = larger(rows, p.cu_seqlens_q[n + 1] - p.cu_seqlens_q[n]);
        keys = larger(keys, p.cu_seqlens_k[n + 1] - p.cu_seqlens_k[n]);
    }
    return {rows, keys};
}

// One half of the bias of a unit, while the unit is computed.
struct Half {
    const Kernels& kernels;
    const Problem& all;
    BucketTable& table;
    const View &tokens, &token_gradients;
    int64_t head, item, count, others;  // tokens of this side and of the other side
    bool of_queries;
    float *rows, *row_gradients;        // of the tokens (count × D), and of a few tokens
    int64_t width = padded(all.dim);

    // Rows that lie a power of two apart would share few lines of the cache.
    static int64_t stride_of(int64_t count) { return padded(count) | TABLE_STEP; }

    static int64_t floats(const Problem& p, int64_t count, bool backward) {
        const int64_t width = padded(p.dim), of_table = (p.table_buckets + 2) * stride_of(count);
        return (padded(count) + TOKENS_AT_ONCE) * width + width * stride_of(count) + (backward ? 2 : 1) * of_table;
    }

    // Calls work(first token, tokens, first bucket, buckets) for some tokens and the buckets within their reach, at a time.
    template <class Work>
    void each_part(const Work& work) const {
        const int64_t farthest = padded(others) - 1;
        for (int64_t start = 0; start < count; start += TOKENS_AT_ONCE) {
            const int64_t stop = smaller(padded(count), start + TOKENS_AT_ONCE);
            const int64_t low = of_queries ? start - farthest : 1 - stop, high = of_queries ? stop - 1 : farthest - start;
            const int64_t first = all.bucket_of[low] / TABLE_STEP * TABLE_STEP, last = padded(all.bucket_of[high] + 1);
            work(start, stop - start, first, last - first);
        }
    }

    void multiply_out(float*& memory, bool backward) {
        const int64_t of_table = (all.table_buckets + 2) * table.stride;
        const auto take = [&](int64_t floats) {
            float* taken = memory;
            memory += floats;
            return taken;
        };
        rows = take(padded(count) * width), row_gradients = take(TOKENS_AT_ONCE * width);
        float* columns = take(width * table.stride);  // of the tokens (D × count)
        table.numbers = take(of_table) + TABLE_STEP;
        memset(rows, 0, static_cast<size_t>(padded(count) * width) * sizeof(float));
        for (int64_t n = 0; n < count; n++)
            memcpy(rows + n * width, tokens.at<float>(item, head, n), static_cast<size_t>(all.dim) * sizeof(float));
        kernels.transpose_columns({1, padded(count), width, rows, columns, table.stride}, 0, width);
        const float* vectors = table.vectors + head * all.table_buckets * width;
        each_part([&](int64_t start, int64_t some, int64_t bucket, int64_t buckets) {
            float* numbers = table.numbers + bucket * table.stride + start;
            kernels.multiply({vectors + bucket * width, width, true, columns + start, table.stride, all.dim, buckets, some,
                              numbers, table.stride, false});
        });
        if (!backward) return;
        float* gradient = take(of_table);
        memset(gradient, 0, static_cast<size_t>(of_table) * sizeof(float));
        table.gradient = gradient + TABLE_STEP;
    }

    void multiply_back(int64_t group) {
        const int64_t of_head = all.table_buckets * width;
        const float* vectors = table.vectors + head * of_head;
        float* vectors_gradient = table.vectors_gradient + (group * all.heads + head) * of_head;
        each_part([&](int64_t start, int64_t some, int64_t bucket, int64_t buckets) {
            const float* gradient = table.gradient + bucket * table.stride + start;
            kernels.multiply({gradient, table.stride, false, vectors + bucket * width, width, buckets, some, width,
                              row_gradients, width, false});
            for (int64_t n = 0; n < smaller(some, count - start); n++) {
                float* to = token_gradients.at<float>(item, head, start + n);
                for (int64_t d = 0; d < all.dim; d++) to[d] += row_gradients[n * width + d];
            }
            kernels.multiply({gradient, table.stride, true, rows + start * width, width, some, buckets, width,
                              vectors_gradient + bucket * width, width, true});
        });
    }
};

// Calls run(problem with its tables, index of its head) between multiplying the tables out and, in a backward pass, back.
template <class Run>
void with_tables(const Kernels& kernels, Unit& unit, int64_t group, bool backward, float* memory, const Run& run) {
    Problem& p = unit.p;
    const int64_t item = unit.index / p.heads;
    Half halves[2] = {
        {kernels, p, p.query_table, p.query, p.query_gradient, unit.head, item, p.rows, p.keys, true, nullptr, nullptr},
        {kernels, p, p.key_table, p.key, p.key_gradient, unit.head, item, p.keys, p.rows, false, nullptr, nullptr}};
    for (Half& half : halves) {
        half.table.stride = Half::stride_of(half.count);
        if (half.table.vectors) half.multiply_out(memory, backward);
    }
    run(p, unit.index, memory);
    for (Half& half : halves)
        if (backward && half.table.vectors) half.multiply_back(group);
}

int64_t floats_of_tables(const Problem& p, bool backward) {
    const auto [rows, keys] = largest_sizes(p);
    return (p.query_table.vectors ? Half::floats(p, rows, backward) : 0) +
           (p.key_table.vectors ? Half::floats(p, keys, backward) : 0);
}

Problem largest_unit(const Problem& all) {
    Problem p = all;
    std::tie(p.rows, p.keys) = largest_sizes(all);
    p.threads = 1;
    return p;
}

}  // namespace

void run_forward_with_tables(const Kernels& kernels, const Problem& p) {
    const int64_t floats = floats_of_tables(p, false) + scratch_of_head(kernels, largest_unit(p));
    parallel_for(items_of(p) * p.heads, p.threads, floats, [&](int64_t index, float* memory) {
        Unit unit = unit_of(p, index / p.heads, index % p.heads);
        if (unit.p.rows == 0 || unit.p.keys == 0) return;
        with_tables(kernels, unit, 0, false, memory, [&](const Problem& one, int64_t head, float* rest) {
            forward_of_head(kernels, one, head, rest);
        });
    });
}

void run_backward_with_tables(const Kernels& kernels, const Problem& p) {
    const int64_t floats = floats_of_tables(p, true) + scratch_of_backward(kernels, largest_unit(p));
    const int64_t items = items_of(p), of_group = divide_up(items, p.table_groups);
    parallel_for(p.table_groups * p.heads, p.threads, floats, [&](int64_t index, float* memory) {
        const int64_t group = index / p.heads;
        for (int64_t item = group * of_group; item < smaller(items, (group + 1) * of_group); item++) {
            Unit unit = unit_of(p, item, index % p.heads);
            if (unit.p.rows == 0 || unit.p.keys == 0) continue;
            with_tables(kernels, unit, group, true, memory, [&](const Problem& one, int64_t head, float* rest) {
                backward_of_head(kernels, one, head, rest);
            });
        }
    });
}

void clear_table_gradients(const Problem& p) {
    const int64_t floats = p.table_groups * p.heads * p.table_buckets * padded(p.dim);
    for (const BucketTable* table : {&p.query_table, &p.key_table})
        if (table->vectors_gradient) memset(table->vectors_gradient, 0, static_cast<size_t>(floats) * sizeof(float));
}

}  // namespace clearhead

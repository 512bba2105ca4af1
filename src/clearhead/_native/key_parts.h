// A backward pass of few rows in chunks of many keys. Each chunk has all rows, so the gradients of its keys and values
// are complete and are written from the cache. The gradients of the queries are added up.
#pragma once
#include <initializer_list>

#include "problem.h"

namespace clearhead {

// Some keys of one key/value head as a separate problem, in float32 without dropout, row ranges and a bias's gradient.
// It writes the gradients of the queries (folded rows × D) and then δ − dl to `of_queries`, and heavy keys.
inline Problem part_of_keys(const Problem& p, int64_t batch, int64_t kv_head, int64_t start, int64_t stop,
                            float* of_queries, HeavyKey* heavy_keys) {
    Problem part = p;
    const int64_t head = kv_head * p.group(), place = p.row_place(batch, head, 0);
    part.batch = part.kv_heads = 1, part.heads = p.group(), part.keys = stop - start;
    part.low -= start, part.high -= start, part.stop -= start;
    for (View Problem::*view : {&Problem::query, &Problem::output_gradient, &Problem::exact_output})
        (part.*view).data = (p.*view).at<float>(batch, head, 0);
    for (View Problem::*view : {&Problem::key, &Problem::value, &Problem::key_gradient, &Problem::value_gradient})
        (part.*view).data = (p.*view).at<float>(batch, kv_head, start);
    if (p.visible.data) part.visible.data = p.visible.at<uint8_t>(batch, head, 0) + start * p.visible.column;
    if (p.bias.data) part.bias.data = p.bias.at<float>(batch, head, 0) + start * p.bias.column;
    part.lse += place;
    if (p.lse_gradient) part.lse_gradient += place;
    part.query_gradient.data = of_queries;
    part.query_gradient.head = p.rows * p.dim, part.query_gradient.row = p.dim;
    part.correction = of_queries + p.folded_rows() * p.dim, part.heavy_keys = heavy_keys;
    return part;
}

// Adds up the results of `count` chunks of `keys` keys each. They lie `size` floats apart.
inline void join_parts(const Problem& p, int64_t batch, int64_t kv_head, const float* of_queries, int64_t count,
                       int64_t size, const HeavyKey* heavy_keys, int64_t keys) {
    for (int64_t r = 0; r < p.folded_rows(); r++) {
        const int64_t head = kv_head * p.group() + r / p.rows, row = r % p.rows;
        float* to = p.query_gradient.at<float>(batch, head, row);
        for (int64_t d = 0; d < p.dim; d++) {
            double total = 0;
            for (int64_t n = 0; n < count; n++) total += of_queries[n * size + r * p.dim + d];
            to[d] = static_cast<float>(total);
        }
        p.correction[p.row_place(batch, head, row)] = of_queries[p.folded_rows() * p.dim + r];
        HeavyKey heavy = {0, -1, 1};
        for (int64_t n = 0; n < count; n++) {
            const HeavyKey& of_part = heavy_keys[n * p.folded_rows() + r];
            heavy.light_sum += of_part.light_sum;
            if (of_part.key >= 0) heavy.key = n * keys + of_part.key, heavy.slope = of_part.slope;
        }
        if (heavy.key < 0) continue;
        const double ds = p.sum_of_score_gradients(batch, head, row) - heavy.light_sum;
        const float factor = static_cast<float>(ds * heavy.slope * p.exact_scale);
        const float *query = p.query.at<float>(batch, head, row), *key = p.key.at<float>(batch, kv_head, heavy.key);
        float* of_key = p.key_gradient.at<float>(batch, kv_head, heavy.key);
        for (int64_t d = 0; d < p.dim; d++) to[d] += factor * key[d], of_key[d] += factor * query[d];
    }
}

}  // namespace clearhead

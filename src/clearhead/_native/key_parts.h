// A backward pass of few rows over many keys in parts of the keys: what a part adds to the gradients of its keys and
// values is all there is to add, so that it is written before it leaves the cache; those of the queries are joined.
#pragma once
#include <initializer_list>

#include "problem.h"

namespace clearhead {

// Some keys of one key/value head as a problem of its own: float32, without dropout, spans and a bias's gradient. What
// it finds of the queries goes to `found`: their gradients, folded rows × D, then δ − dl; and to `heavy_keys`.
inline Problem part_of_keys(const Problem& p, int64_t batch, int64_t kv_head, int64_t start, int64_t stop,
                            float* found, HeavyKey* heavy_keys) {
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
    part.query_gradient.data = found;
    part.query_gradient.head = p.rows * p.dim, part.query_gradient.row = p.dim;
    part.correction = found + p.folded_rows() * p.dim, part.heavy_keys = heavy_keys;
    return part;
}

// Joins what `count` parts of one key/value head, of `keys` keys each, have found: numbers `size` floats apart, and heavy
// keys.
inline void join_parts(const Problem& p, int64_t batch, int64_t kv_head, const float* found, int64_t count,
                       int64_t size, const HeavyKey* heavy_keys, int64_t keys) {
    for (int64_t r = 0; r < p.folded_rows(); r++) {
        const int64_t head = kv_head * p.group() + r / p.rows, row = r % p.rows;
        float* to = p.query_gradient.at<float>(batch, head, row);
        for (int64_t d = 0; d < p.dim; d++) {
            double total = 0;
            for (int64_t n = 0; n < count; n++) total += found[n * size + r * p.dim + d];
            to[d] = static_cast<float>(total);
        }
        p.correction[p.row_place(batch, head, row)] = found[p.folded_rows() * p.dim + r];
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

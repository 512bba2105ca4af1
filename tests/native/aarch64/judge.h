// Attention as its formula says, in float64 and one number after the other. It judges the compiled kernel.
#pragma once
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace judge {

typedef std::vector<double> Numbers;

// Tensors are dense: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), masks (B, H, L, S).
struct Call {
    int64_t batch, heads, kv_heads, rows, keys, dim, value_dim;
    double scale, softcap;  // softcap 0: none
    Numbers query, key, value;
    Numbers sinks;              // (H), or empty
    std::vector<uint8_t> sees;  // whether the row sees the key
    Numbers bias, kept;         // what is added to a score; the factor that dropout gives a weight; or empty
    Numbers output_gradient;    // (B, H, L, Dv)
    Numbers lse_gradient;       // (B, H, L), or empty

    int64_t planes() const { return batch * heads; }
    int64_t of_keys(int64_t plane) const { return plane / heads * kv_heads + plane % heads / (heads / kv_heads); }
};

struct Results {
    Numbers output, undropped, lse;                        // (B, H, L, Dv), the same without dropout, (B, H, L)
    Numbers raw, scores, weights;                          // (B, H, L, S): scale · q·k, with soft-cap and bias, p
    Numbers query_gradient, key_gradient, value_gradient;  // as the operands
    Numbers bias_gradient, correction;                     // (B, H, L, S), and δ − dl (B, H, L)
};

inline double dot(const double* a, const double* b, int64_t count) { return std::inner_product(a, a + count, b, 0.0); }

// One row of the scores and weights, and its output.
inline void attend(const Call& c, Results& r, int64_t plane, int64_t row) {
    const int64_t line = plane * c.rows + row, kv = c.of_keys(plane) * c.keys, place = line * c.keys;
    const double* query = &c.query[line * c.dim];
    double top = c.sinks.empty() ? -INFINITY : c.sinks[plane % c.heads], total = 0;
    for (int64_t j = 0; j < c.keys; j++) {
        if (!c.sees[place + j]) continue;
        double x = r.raw[place + j] = c.scale * dot(query, &c.key[(kv + j) * c.dim], c.dim);
        if (c.softcap != 0) x = c.softcap * tanh(x / c.softcap);
        if (!c.bias.empty()) x += c.bias[place + j];
        r.scores[place + j] = x;
        top = std::max(top, x);
    }
    if (!c.sinks.empty() && top > -INFINITY) total = exp(c.sinks[plane % c.heads] - top);
    for (int64_t j = 0; j < c.keys && top > -INFINITY; j++) total += exp(r.scores[place + j] - top);
    r.lse[line] = total == 0 ? -INFINITY : top + log(total);
    for (int64_t j = 0; j < c.keys && total > 0; j++) {
        const double weight = r.weights[place + j] = exp(r.scores[place + j] - r.lse[line]);
        if (weight == 0) continue;
        const double dropped = c.kept.empty() ? weight : weight * c.kept[place + j];
        for (int64_t d = 0; d < c.value_dim; d++) {
            r.output[line * c.value_dim + d] += dropped * c.value[(kv + j) * c.value_dim + d];
            r.undropped[line * c.value_dim + d] += weight * c.value[(kv + j) * c.value_dim + d];
        }
    }
}

// What one row adds to the gradients.
inline void attend_back(const Call& c, Results& r, int64_t plane, int64_t row) {
    const int64_t line = plane * c.rows + row, kv = c.of_keys(plane) * c.keys, place = line * c.keys;
    const double* gradient = &c.output_gradient[line * c.value_dim];
    const double of_lse = c.lse_gradient.empty() ? 0 : c.lse_gradient[line];
    const double delta = dot(gradient, &r.output[line * c.value_dim], c.value_dim);
    r.correction[line] = delta - of_lse;
    for (int64_t j = 0; j < c.keys; j++) {
        const double weight = r.weights[place + j], kept = c.kept.empty() ? 1 : c.kept[place + j];
        if (weight == 0) continue;
        const double dp = kept * dot(gradient, &c.value[(kv + j) * c.value_dim], c.value_dim);
        const double ds = r.bias_gradient[place + j] = weight * (dp - delta + of_lse);
        const double slope = c.softcap != 0 ? 1 - pow(tanh(r.raw[place + j] / c.softcap), 2) : 1;
        for (int64_t d = 0; d < c.value_dim; d++)
            r.value_gradient[(kv + j) * c.value_dim + d] += kept * weight * gradient[d];
        for (int64_t d = 0; d < c.dim; d++) {
            r.query_gradient[line * c.dim + d] += ds * slope * c.scale * c.key[(kv + j) * c.dim + d];
            r.key_gradient[(kv + j) * c.dim + d] += ds * slope * c.scale * c.query[line * c.dim + d];
        }
    }
}

inline Results compute(const Call& c) {
    Results r;
    const size_t lines = static_cast<size_t>(c.planes() * c.rows), cells = lines * static_cast<size_t>(c.keys);
    for (Numbers* numbers : {&r.output, &r.undropped}) numbers->assign(lines * static_cast<size_t>(c.value_dim), 0);
    for (Numbers* numbers : {&r.raw, &r.scores}) numbers->assign(cells, -INFINITY);
    for (Numbers* numbers : {&r.weights, &r.bias_gradient}) numbers->assign(cells, 0);
    for (Numbers* numbers : {&r.lse, &r.correction}) numbers->assign(lines, 0);
    r.query_gradient.assign(c.query.size(), 0), r.key_gradient.assign(c.key.size(), 0);
    r.value_gradient.assign(c.value.size(), 0);
    for (int64_t plane = 0; plane < c.planes(); plane++)
        for (int64_t row = 0; row < c.rows; row++) {
            attend(c, r, plane, row);
            if (!c.output_gradient.empty()) attend_back(c, r, plane, row);
        }
    return r;
}

}  // namespace judge

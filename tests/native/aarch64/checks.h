// What the kernel computes of a case, compared with the judge: the largest errors of each kind of call.
#pragma once
#include "cases.h"

namespace checks {

using cases::Case;
using cases::Operands;
using cases::Tensor;
using clearhead::Problem;
using clearhead::Statistics;
using clearhead::Type;
using judge::Numbers;

// Scalar Philox4x32-10, of which dropout is drawn: 16 bits for a key.
inline uint32_t random_bits(uint64_t seed, int64_t stream, int64_t row, int64_t key) {
    uint32_t c[4] = {static_cast<uint32_t>(key / 8), static_cast<uint32_t>(row), static_cast<uint32_t>(stream), 0};
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        const uint64_t x = uint64_t(0xD2511F53u) * c[0], y = uint64_t(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(y >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(y),
                                  static_cast<uint32_t>(x >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(x)};
        memcpy(c, next, sizeof c);
    }
    return c[key % 8 / 2] >> (key % 2 * 16) & 0xffff;
}

// The dense tensors of the judge. Operands that no row sees are zero there, and NaN for the kernel if the case says so.
inline judge::Call judged(const Case& c, Operands& o) {
    judge::Call call;
    call.batch = c.batch, call.heads = c.heads, call.kv_heads = c.kv_heads, call.rows = c.rows, call.keys = c.keys;
    call.dim = c.dim, call.value_dim = c.value_dim;
    call.scale = 1 / sqrt(static_cast<double>(c.dim)), call.softcap = c.softcap;
    std::vector<uint8_t> seen(static_cast<size_t>(c.batch * c.kv_heads * c.keys)),
        sighted(static_cast<size_t>(c.batch * c.heads * c.rows));
    for (int64_t plane = 0; plane < c.batch * c.heads; plane++)
        for (int64_t i = 0; i < c.rows; i++)
            for (int64_t j = 0; j < c.keys; j++) {
                double bias = 0;
                const bool sees = cases::sees(c, o, plane / c.heads, plane % c.heads, i, j, bias);
                call.sees.push_back(sees);
                if (!o.bias.empty()) call.bias.push_back(bias);
                seen[static_cast<size_t>(call.of_keys(plane) * c.keys + j)] |= sees;
                sighted[static_cast<size_t>(plane * c.rows + i)] |= sees;
                if (!c.drop_below) continue;
                const size_t item = cases::sequence_of(c.cu_seqlens_q, i);
                const int64_t row = c.cu_seqlens_q.empty() ? i : i - c.cu_seqlens_q[item];
                const int64_t key = c.cu_seqlens_k.empty() ? j : j - c.cu_seqlens_k[cases::sequence_of(c.cu_seqlens_k, j)];
                const int64_t batch = c.cu_seqlens_q.empty() ? plane / c.heads : static_cast<int64_t>(item);
                const bool kept = random_bits(o.seed, batch * c.heads + plane % c.heads, row, key) >= c.drop_below;
                call.kept.push_back(kept ? 65536.0 / (65536 - c.drop_below) : 0);
            }
    call.query = o.query.numbers(), call.key = o.key.numbers(), call.value = o.value.numbers();
    call.output_gradient = o.output_gradient.numbers();
    call.sinks.assign(o.sinks.begin(), o.sinks.end());
    call.lse_gradient.assign(o.lse_gradient.begin(), o.lse_gradient.end());
    const auto poison = [&](Tensor& tensor, Numbers& numbers, const std::vector<uint8_t>& marks) {
        for (size_t n = 0; c.poison && n < numbers.size(); n++)
            if (!marks[n / static_cast<size_t>(tensor.d)]) numbers[n] = 0, tensor.set(static_cast<int64_t>(n), NAN);
    };
    poison(o.query, call.query, sighted), poison(o.key, call.key, seen), poison(o.value, call.value, seen);
    return call;
}

inline Problem problem_of(const Case& c, Operands& o, Tensor& output, double* lse) {
    Problem p = {};
    p.type = c.type, p.batch = c.batch, p.heads = c.heads, p.kv_heads = c.kv_heads, p.rows = c.rows, p.keys = c.keys;
    p.dim = c.dim, p.value_dim = c.value_dim, p.exact_scale = 1 / sqrt(static_cast<double>(c.dim));
    p.scale = static_cast<float>(p.exact_scale), p.softcap = c.softcap, p.exact_softcap = c.softcap;
    p.query = o.query.view(), p.key = o.key.view(), p.value = o.value.view(), p.output = output.view();
    p.wide_output = output.type == Type::float32, p.lse = lse, p.lse_batch = c.heads * c.rows, p.lse_head = c.rows;
    p.sinks = o.sinks.empty() ? nullptr : o.sinks.data(), p.low = o.low, p.high = o.high, p.stop = o.stop;
    if (!o.first.empty()) p.first = o.first.data(), p.last = o.last.data(), p.range_batch = c.rows, p.range_row = 1;
    int64_t batch, heads, rows;
    cases::shape_of_visible(c, batch, heads, rows);
    if (!o.visible.empty())
        p.visible = {o.visible.data(), batch > 1 ? heads * rows * c.keys : 0, heads > 1 ? rows * c.keys : 0,
                     rows > 1 ? c.keys : 0, 1};
    cases::shape_of_bias(c, batch, heads);
    if (!o.bias.empty())
        p.bias = {o.bias.data(), batch > 1 ? heads * c.rows * c.keys : 0, heads > 1 ? c.rows * c.keys : 0, c.keys, 1};
    if (c.mask == cases::Mask::turned) p.bias.row = 1, p.bias.column = c.rows;
    p.threads = c.threads;
    if (!c.cu_seqlens_q.empty()) {
        p.sequences = static_cast<int64_t>(c.cu_seqlens_q.size()) - 1;
        p.cu_seqlens_q = c.cu_seqlens_q.data(), p.cu_seqlens_k = c.cu_seqlens_k.data();
    }
    p.drop_below = c.drop_below, p.seed = o.seed, p.offset.num_heads = c.heads;
    p.kept_factor = 65536.f / static_cast<float>(65536 - c.drop_below);
    return p;
}

// The largest error relative to the largest number that is finite, or absolute where that is zero. What a type of 16
// bits rounds off is no error: half of its last digit.
inline double error_of(const Numbers& got, const Numbers& expected, Type type = Type::float32) {
    double largest = 0, error = 0;
    for (const double x : expected)
        if (isfinite(x)) largest = std::max(largest, fabs(x));
    const double unit = type == Type::float32 ? 0 : type == Type::float16 ? 0x1p-11 : 0x1p-8;
    const double least = type == Type::float16 ? 0x1p-25 : 0;  // below float16's normal numbers
    for (size_t n = 0; n < expected.size(); n++) {
        if (got[n] == expected[n]) continue;  // infinities too
        const double distance = fabs(got[n] - expected[n]) - std::max(unit * fabs(expected[n]), least);
        error = distance > error || distance != distance ? distance : error;
        if (error != error) return INFINITY;
    }
    return error / (largest > 1e-9 ? largest : 1);
}

template <class T>
Numbers numbers(const std::vector<T>& from) {
    return Numbers(from.begin(), from.end());
}

enum Pass { FORWARD, BACKWARD, STATISTICS, PASSES };

// The largest error of each pass, and of which result it is.
struct Errors {
    int64_t calls = 0;
    double largest[PASSES] = {};
    std::string result[PASSES];

    void note(Pass pass, const char* name, double error) {
        if (result[pass].empty() || error > largest[pass]) largest[pass] = error, result[pass] = name;
    }
};

}  // namespace checks

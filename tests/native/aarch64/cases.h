// The calls that are compared: their sizes, kinds of masks and options, and their operands, drawn from a seed.
#pragma once
#include <string.h>

#include <random>
#include <string>

#include "judge.h"
#include "problem.h"

namespace cases {

using clearhead::Type;

enum class Mask {
    none,
    causal,
    window,
    bottom_right,
    lengths,
    runs,
    keys,
    pairs,
    heads,
    bias,
    bias_of_heads,
    turned,
    both
};

struct Case {
    std::string kind;
    Type type = Type::float32;
    int64_t batch = 2, heads = 4, kv_heads = 2, rows = 29, keys = 67, dim = 24, value_dim = 16;
    Mask mask = Mask::none;
    float softcap = 0;
    bool sinks = false, lse_gradient = false, poison = false, statistics = false, exact = false;
    uint32_t drop_below = 0;
    double spread = 1;  // of the queries
    int64_t threads = 2;
    std::vector<int64_t> cu_seqlens_q, cu_seqlens_k;  // of packed sequences
};

// float16 and bfloat16 by their definition, to the nearest and to even.
inline uint16_t half_bits(double x) {
    int exponent = 0;
    frexp(x, &exponent);
    const int e = x == 0 ? -14 : std::max(exponent - 1, -14);
    const int digits = static_cast<int>(nearbyint(ldexp(fabs(x), 10 - e)));
    return static_cast<uint16_t>((signbit(x) ? 0x8000 : 0) + ((e + 15) << 10) + digits - 1024);
}

inline double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    const double size = exponent == 31 ? (digits ? NAN : INFINITY)
                        : exponent     ? ldexp(1024 + digits, exponent - 25)
                                       : ldexp(digits, -24);
    return bits & 0x8000 ? -size : size;
}

inline uint16_t bfloat16_bits(double x) {
    const float nearest = static_cast<float>(x);
    uint32_t bits;
    memcpy(&bits, &nearest, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline double bfloat16_value(uint16_t from) {
    const uint32_t bits = static_cast<uint32_t>(from) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// A tensor (A, B, C, D) of a type, laid out (A, C, B, D) as projections leave it.
struct Tensor {
    Type type;
    int64_t a, b, c, d;
    std::vector<unsigned char> memory;

    Tensor(Type of, int64_t a_, int64_t b_, int64_t c_, int64_t d_) : type(of), a(a_), b(b_), c(c_), d(d_) {
        memory.assign(static_cast<size_t>(a * b * c * d * bytes() + 1), 0xff);  // what is not written is NaN
    }
    int64_t bytes() const { return type == Type::float32 ? 4 : 2; }
    clearhead::View view() { return {memory.data(), b * c * d, d, b * d, 1}; }
    void* at(int64_t n) const {  // the n-th number, counted in the order (A, B, C, D)
        const int64_t column = n % d, row = n / d % c, head = n / d / c % b, batch = n / d / c / b;
        const int64_t place = ((batch * c + row) * b + head) * d + column;
        return const_cast<unsigned char*>(memory.data()) + place * bytes();
    }
    void set(int64_t n, double x) {
        const float single = static_cast<float>(x);
        const uint16_t half = type == Type::float16 ? half_bits(x) : bfloat16_bits(x);
        if (type == Type::float32) memcpy(at(n), &single, 4);
        else memcpy(at(n), &half, 2);
    }
    double get(int64_t n) const {
        float single;
        uint16_t half;
        if (type == Type::float32) return memcpy(&single, at(n), 4), single;
        memcpy(&half, at(n), 2);
        return type == Type::float16 ? half_value(half) : bfloat16_value(half);
    }
    judge::Numbers numbers() const {
        judge::Numbers result(static_cast<size_t>(a * b * c * d));
        for (size_t n = 0; n < result.size(); n++) result[n] = get(static_cast<int64_t>(n));
        return result;
    }
};

constexpr int64_t FAR = int64_t(1) << 40;  // farther than any row is from any key

struct Operands {
    Tensor query, key, value, output_gradient;
    std::vector<float> sinks = {}, lse_gradient = {};
    std::vector<int64_t> first = {}, last = {};  // (B, L)
    std::vector<uint8_t> visible = {};           // (B or 1, H or 1, L or 1, S)
    std::vector<float> bias = {};                // (B or 1, H or 1, L, S), or (1, 1, S, L) if it is read turned
    int64_t low = -FAR, high = FAR, stop = 0;    // of the band
    uint64_t seed = 0x9e3779b97f4a7c15u;
};

inline bool has_visible(Mask m) { return m == Mask::keys || m == Mask::pairs || m == Mask::heads || m == Mask::both; }
inline bool has_bias(Mask m) {
    return m == Mask::bias || m == Mask::bias_of_heads || m == Mask::turned || m == Mask::both;
}

// (whole batch, whole heads, whole rows) of the tensor of marks.
inline void shape_of_visible(const Case& c, int64_t& batch, int64_t& heads, int64_t& rows) {
    batch = c.mask == Mask::keys || c.mask == Mask::heads ? c.batch : 1;
    heads = c.mask == Mask::heads ? c.heads : 1, rows = c.mask == Mask::keys ? 1 : c.rows;
}

inline void shape_of_bias(const Case& c, int64_t& batch, int64_t& heads) {
    batch = c.mask == Mask::bias ? c.batch : 1;
    heads = c.mask == Mask::bias || c.mask == Mask::bias_of_heads ? c.heads : 1;
}

inline Operands draw(const Case& c, std::mt19937_64& random) {
    std::normal_distribution<double> normal;
    const auto tensor = [&](int64_t heads, int64_t rows, int64_t columns, double spread) {
        Tensor result(c.type, c.batch, heads, rows, columns);
        for (int64_t n = 0; n < c.batch * heads * rows * columns; n++) result.set(n, spread * normal(random));
        return result;
    };
    const auto numbers = [&](int64_t count) {
        std::vector<float> result(static_cast<size_t>(count));
        for (float& x : result) x = static_cast<float>(normal(random));
        return result;
    };
    Operands o = {tensor(c.heads, c.rows, c.dim, c.spread), tensor(c.kv_heads, c.keys, c.dim, 1),
                  tensor(c.kv_heads, c.keys, c.value_dim, 1), tensor(c.heads, c.rows, c.value_dim, 1)};
    o.stop = c.keys;
    if (c.sinks) o.sinks = numbers(c.heads);
    if (c.lse_gradient) o.lse_gradient = numbers(c.batch * c.heads * c.rows);
    if (c.mask == Mask::causal) o.high = 0;
    if (c.mask == Mask::bottom_right) o.high = c.keys - c.rows;
    if (c.mask == Mask::window) o.low = -11, o.high = 2;
    if (c.mask == Mask::lengths) o.stop = c.keys - c.keys / 3;
    for (int64_t n = 0; c.mask == Mask::runs && n < c.batch * c.rows; n++) {
        o.first.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(c.keys)));
        o.last.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(c.keys + 1)));  // some rows see nothing
    }
    int64_t batch, heads, rows;
    shape_of_visible(c, batch, heads, rows);
    for (int64_t n = 0; has_visible(c.mask) && n < batch * heads * rows * c.keys; n++)
        o.visible.push_back(random() % 3 != 0);
    shape_of_bias(c, batch, heads);
    if (has_bias(c.mask)) o.bias = numbers(batch * heads * c.rows * c.keys);
    for (size_t n = 0; n < o.bias.size(); n++)
        if (random() % 16 == 0) o.bias[n] = -INFINITY;
    return o;
}

// The number of the packed sequence of a row or key; 0 in a batch.
inline size_t sequence_of(const std::vector<int64_t>& starts, int64_t n) {
    size_t d = 0;
    while (d + 1 < starts.size() && starts[d + 1] <= n) d++;
    return d;
}

// Whether a row sees a key, and its bias.
inline bool sees(const Case& c, const Operands& o, int64_t b, int64_t h, int64_t i, int64_t j, double& bias) {
    const size_t of_row = sequence_of(c.cu_seqlens_q, i), of_key = sequence_of(c.cu_seqlens_k, j);
    if (of_row != of_key) return false;
    const int64_t row = c.cu_seqlens_q.empty() ? i : i - c.cu_seqlens_q[of_row];
    const int64_t key = c.cu_seqlens_k.empty() ? j : j - c.cu_seqlens_k[of_key];
    bool seen = row + o.low <= key && key <= row + o.high && key < o.stop;
    const size_t place = static_cast<size_t>(b * c.rows + i);
    if (!o.first.empty()) seen = seen && o.first[place] <= j && j < o.last[place];
    int64_t batch, heads, rows;
    shape_of_visible(c, batch, heads, rows);
    const int64_t cell = ((b % batch * heads + h % heads) * rows + i % rows) * c.keys + j;
    if (!o.visible.empty()) seen = seen && o.visible[static_cast<size_t>(cell)];
    if (o.bias.empty()) return seen;
    shape_of_bias(c, batch, heads);
    const int64_t of_bias = ((b % batch * heads + h % heads) * c.rows + i) * c.keys + j;
    bias = o.bias[static_cast<size_t>(c.mask == Mask::turned ? j * c.rows + i : of_bias)];
    return seen && bias > -INFINITY;
}

}  // namespace cases

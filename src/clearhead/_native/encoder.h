// What an encoder computes between its matrix products, each in one pass over rows that the product before has left in the
// cache: residual and norm, and rotary positions.
#pragma once
#include "halves.h"

namespace clearhead::ISA {

template <class T>
struct NormedRow {
    const RowNorm& n;
    T* x;
    const T* residual;
    T* total;

    NormedRow(const RowNorm& of, int64_t row) : n(of) {
        const int64_t start = row * n.features;
        x = static_cast<T*>(n.x) + start;
        residual = n.residual ? static_cast<const T*>(n.residual) + start : nullptr;
        total = n.total ? static_cast<T*>(n.total) + start : nullptr;
    }

    // Writes x + residual to `sums`, and its sum in lanes to `sum`.
    void add(float* sums, Floats& sum) const {
        for (int64_t i = 0; i < n.features; i += LANES) {
            const int64_t count = n.features - i;
            Floats of_both = load_some(x + i, count);
            if (residual) of_both += load_some(residual + i, count);
            if (total) store_some(total + i, of_both, count);
            store(sums + i, of_both);  // zero beyond the last feature
            sum += of_both;
        }
    }

    // The sum of squares of differences from `center`.
    float squares(const float* sums, float center) const {
        Floats result = {};
        int64_t i = 0;
        for (; i + LANES <= n.features; i += LANES) {
            const Floats difference = load(sums + i) - center;
            result += difference * difference;
        }
        float rest = 0;
        for (; i < n.features; i++) rest += (sums[i] - center) * (sums[i] - center);
        return sum(result) + rest;
    }

    void write(const float* sums, float center, float factor) const {
        for (int64_t i = 0; i < n.features; i += LANES) {
            const int64_t count = n.features - i;
            Floats y = (load(sums + i) - center) * factor;
            if (n.weight) y *= load_some(n.weight + i, count);
            if (n.bias) y += load_some(n.bias + i, count);
            store_some(x + i, y, count);
        }
    }
};

// x ← (s − mean s) / √(var s + ε) · weight + bias with s = x + residual, or without the mean (RMSNorm). Needs
// `features` + LANES floats of scratch.
template <class T>
static void norm_rows(const RowNorm& n, int64_t start, int64_t stop, float* sums) {
    const float features = static_cast<float>(n.features);
    for (int64_t row = start; row < stop; row++) {
        const NormedRow<T> normed(n, row);
        Floats lanes = {};
        normed.add(sums, lanes);
        const float center = n.centers ? sum(lanes) / features : 0;
        const double variance = static_cast<double>(normed.squares(sums, center)) / features;
        normed.write(sums, center, static_cast<float>(1 / sqrt(variance + n.epsilon)));
    }
}

// Rotates pairs (x_d, x_{d+D/2}) of each head by the angles of the row: Su et al., "RoFormer", 2021, in the order of halves.
template <class T>
static void rotate_rows(const Rotation& r, int64_t start, int64_t stop) {
    const int64_t half = r.dim / 2;
    for (int64_t row = start; row < stop; row++) {
        const int64_t place = row % r.positions * r.dim;
        const float *cosine = r.cosine + place, *sine = r.sine + place;
        for (int64_t head = 0; head < r.heads; head++) {
            T* x = static_cast<T*>(r.x) + row * r.row + head * r.head;
            for (int64_t d = 0; d < half; d += LANES) {
                const int64_t count = half - d;
                const Floats first = load_some(x + d, count), second = load_some(x + half + d, count);
                store_some(x + d, first * load_some(cosine + d, count) - second * load_some(sine + d, count), count);
                const Floats turned = second * load_some(cosine + half + d, count) + first * load_some(sine + half + d, count);
                store_some(x + half + d, turned, count);
            }
        }
    }
}

}  // namespace clearhead::ISA

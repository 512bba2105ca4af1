// The mask of a tile of rows and a block of keys. It has one bit for each row and key. With a bias it has the number that
// is added to the score instead, −∞ where hidden. Rows lie in the lanes, as in the scores.
#pragma once
#include "tile.h"

namespace clearhead::ISA {

enum class MaskForm { nothing, everything, bits, numbers };  // the first two: no key or all keys are visible to all rows

struct TileMask {
    MaskForm form;
    const uint32_t* bits;  // bit l of bits[v · BLOCK + key] is set where the row in lane l sees the key
    const float* numbers;  // (keys × V·LANES)
};

// Calls work(the form of the mask, as a constant).
template <class Work>
INLINE void by_form(const TileMask& mask, const Work& work) {
    if (mask.form == MaskForm::bits) return work(Constant<MaskForm::bits>());
    if (mask.form == MaskForm::numbers) return work(Constant<MaskForm::numbers>());
    return work(Constant<MaskForm::everything>());
}

// The mask from another key on.
template <int V>
INLINE TileMask from_key(const TileMask& mask, int64_t key) {
    return {mask.form, mask.bits ? mask.bits + key : nullptr,
            mask.numbers ? mask.numbers + key * V * LANES : nullptr};
}

// A bias in units of log 2. The lowest number does not become −∞, which would hide: models use it as a finite stand-in.
INLINE Floats in_units_of_log2(Floats bias, float unit = LOG2E) {
    return bias == splat(-INFINITY) ? bias : larger(splat(LOWEST), unit * bias);
}

// A hidden score is −∞ even if it was NaN: the key may be visible to other rows.
INLINE Floats add_mask(Floats score, Floats added) { return added == splat(-INFINITY) ? added : score + added; }

INLINE Floats hide(Floats score, uint32_t bits) {
    Ints lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = 1 << lane;
    return (splat(static_cast<int32_t>(bits)) & lanes) != 0 ? score : splat(-INFINITY);
}

// Applies the mask of a tile to scores.
template <MaskForm FORM, int V>
INLINE Floats masked(Floats score, const TileMask& mask, int64_t key, int v) {
    if (FORM == MaskForm::bits) return hide(score, mask.bits[v * BLOCK + key]);
    if (FORM == MaskForm::numbers) return add_mask(score, load(mask.numbers + (key * V + v) * LANES));
    return score;
}

// The bias of a row for LANES scores from column j on, −∞ where hidden.
INLINE Floats mask_row(const Problem& p, int64_t batch, int64_t head, int64_t row, int64_t j, int64_t count) {
    Floats added = {};
    if (p.bias.data) {
        const float* from = p.bias.at<float>(batch, head, row) + j * p.bias.column;
        if (p.bias.column == 1) added = load_some(from, count);
        else
            for (int64_t lane = 0; lane < count; lane++) added[lane] = from[lane * p.bias.column];
        added = in_units_of_log2(added);
    }
    if (p.visible.data) {
        typedef uint8_t Few __attribute__((vector_size(LANES)));
        Few visible = {};
        const uint8_t* from = p.visible.at<uint8_t>(batch, head, row) + j * p.visible.column;
        if (p.visible.column == 1 && count == LANES) memcpy(&visible, from, LANES);
        else
            for (int64_t lane = 0; lane < count; lane++) visible[lane] = from[lane * p.visible.column];
        typedef uint16_t Pairs __attribute__((vector_size(LANES * 2)));  // in two steps of one instruction each
        added = __builtin_convertvector(__builtin_convertvector(visible, Pairs), Ints) != 0 ? added : splat(-INFINITY);
    }
    return added;
}

// A function that prefetches the masks of a tile for the block that begins at the key `start`: fetch(done, some, all), for
// a part of the rows, between two steps of a product. The rows are too far apart for the processor's prefetcher, and
// prefetching all of them together would stall. Packed masks need none: they are read sequentially.
INLINE auto fetch_masks(const Problem& p, const Tile& tile, int64_t batch, int64_t start) {
    const bool bias = p.bias.data && p.bias.row && p.bias.column == 1;
    const bool visible = p.visible.data && p.visible.row && p.visible.column == 1;
    const int64_t stop = !tile.masks && (bias || visible) ? smaller(start + BLOCK, p.keys) : start;
    return [&p, &tile, batch, start, stop](int64_t done, int64_t some, int64_t all) __attribute__((always_inline)) {
        if (start >= stop) return;
        for (int64_t lane = tile.count * done / all; lane < tile.count * (done + some) / all; lane++) {
            const int64_t head = tile.head[lane], row = tile.row[lane];
            if (p.bias.data)
                for (int64_t j = start; j < stop; j += 16)
                    __builtin_prefetch(p.bias.at<float>(batch, head, row) + j, 0, 2);
            if (p.visible.data)
                for (int64_t j = start; j < stop; j += 64)
                    __builtin_prefetch(p.visible.at<uint8_t>(batch, head, row) + j, 0, 2);
        }
    };
}

}  // namespace clearhead::ISA

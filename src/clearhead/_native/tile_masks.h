// Makes the mask of a tile and a block of keys from row ranges, bool mask and bias, or reads it from packed masks.
#pragma once
#include "bucket_tables.h"

namespace clearhead::ISA {

constexpr int SPAN = 4 * LANES;  // keys whose bytes of a bool mask fill a vector
typedef uint8_t Bytes __attribute__((vector_size(SPAN)));
typedef uint8_t LooseBytes __attribute__((vector_size(SPAN), aligned(1)));

constexpr int64_t MASK_BITS = BLOCK * ROW_VECTORS;                  // words of the mask of a tile and a block,
constexpr int64_t MASK_SCRATCH_FLOATS = MASK_BITS + BLOCK * TILE;  // and with the numbers behind them

// The bool mask of at most SPAN keys.
static __attribute__((noinline)) Bytes marks_one_by_one(const uint8_t* from, int64_t column, int64_t count) {
    Bytes marks = {};
    for (int64_t j = 0; j < smaller(SPAN, count); j++) marks[j] = from[j * column];
    return marks;
}

INLINE Bytes marks_of_row(const uint8_t* from, int64_t column, int64_t count) {
    if (column == 1 && count >= SPAN) return *reinterpret_cast<const LooseBytes*>(from);
    return marks_one_by_one(from, column, count);
}

// The coverage of a range of keys by a bool mask that all rows share.
static MaskForm shared_marks(const Problem& p, int64_t batch, int64_t head, int64_t start, int64_t stop) {
    const uint8_t* marks = p.visible.at<uint8_t>(batch, head, 0);
    int64_t visible = 0;
    for (int64_t j = start; j < stop; j++) visible += marks[j * p.visible.column] != 0;
    return visible == 0 ? MaskForm::nothing : visible == stop - start ? MaskForm::everything : MaskForm::bits;
}

// The visible keys among SPAN keys from `start` on, for eight rows from lane `lane` on. Bit r of byte j is row r's.
template <bool MARKS>
INLINE Bytes collect_bits(const Problem& p, const Tile& tile, int64_t batch, int lane, int64_t start) {
    Bytes places, bits = {};
    for (int j = 0; j < SPAN; j++) places[j] = static_cast<uint8_t>(j);
    for (int r = 0; r < smaller(8, LANES); r++, lane++) {
        const int64_t first = tile.first[lane] - start, last = tile.last[lane] - start;
        const uint8_t bit = static_cast<uint8_t>(1 << r);
        Bytes visible = Bytes{} + bit;
        if (MARKS) {
            const uint8_t* from = p.visible.at<uint8_t>(batch, tile.head[lane], tile.row[lane]);
            const Bytes marks = marks_of_row(from + start * p.visible.column, p.visible.column, p.keys - start);
            visible = marks != 0 ? visible : Bytes{};
        }
        if (first > 0 || last < SPAN) {
            const uint8_t from = static_cast<uint8_t>(smaller(SPAN, larger(0, first)));
            const uint8_t to = static_cast<uint8_t>(smaller(SPAN, larger(0, last)));
            visible = (places >= from) & (places < to) ? visible : Bytes{};
        }
        bits |= visible;
    }
    return bits;
}

// Writes the bits of a tile; returns their form.
template <int V, bool MARKS>
static MaskForm bits_of_tile(const Problem& p, const Tile& tile, int64_t batch, int64_t start, int64_t count,
                          uint32_t* to) {
    uint32_t any = 0, all = ~0u;
    for (int v = 0; v < V; v++)
        for (int64_t j = 0; j < count; j += SPAN) {
            uint8_t low[SPAN], high[SPAN] = {};
            const Bytes bits = collect_bits<MARKS>(p, tile, batch, v * LANES, start + j);
            memcpy(low, &bits, SPAN);
            if (LANES > 8) {
                const Bytes upper = collect_bits<MARKS>(p, tile, batch, v * LANES + 8, start + j);
                memcpy(high, &upper, SPAN);
            }
            uint32_t* place = to + v * BLOCK + j;
            for (int k = 0; k < SPAN; k++) place[k] = low[k] | static_cast<uint32_t>(high[k]) << 8;
            for (int k = 0; k < smaller(SPAN, count - j); k++) any |= place[k], all &= place[k];
        }
    return any == 0 ? MaskForm::nothing : all == (1u << LANES) - 1 ? MaskForm::everything : MaskForm::bits;
}

// `load_transposed` for columns with a stride, or for the last `count` columns.
static __attribute__((noinline)) void load_some_transposed(const float* const (&from)[LANES], int64_t j,
                                                           int64_t column, int64_t count, Floats (&square)[LANES]) {
    for (int64_t k = 0; k < LANES; k++)
        for (int64_t r = 0; r < LANES; r++) square[k][r] = k < count ? from[r][(j + k) * column] : 0;
}

// Writes the bias of a tile, −∞ where a bit is not set (if `bits` is not null), and returns its form.
template <int V>
static MaskForm bias_of_tile(const Problem& p, const Tile& tile, int64_t batch, int64_t start, int64_t stop,
                          const uint32_t* bits, float* to, float unit) {
    Floats best = splat(-INFINITY);
    for (int v = 0; v < V; v++) {
        const float* from[LANES];
        for (int r = 0; r < LANES; r++)
            from[r] = p.bias.at<float>(batch, tile.head[v * LANES + r], tile.row[v * LANES + r]);
        for (int64_t j = start; j < stop; j += LANES) {
            Floats square[LANES];
            if (p.bias.column == 1 && j + LANES <= p.keys) {
                load_transposed(from, j, square);
            } else {
                load_some_transposed(from, j, p.bias.column, p.keys - j, square);
            }
            const int64_t key = j - start;
            UNROLL for (int r = 0; r < LANES; r++) {
                Floats added = in_units_of_log2(square[r], unit);
                if (bits) added = hide(added, bits[v * BLOCK + key + r]);
                best = larger(added, best);
                store(to + ((key + r) * V + v) * LANES, added);
            }
        }
    }
    return largest_lane(best) == -INFINITY ? MaskForm::nothing : MaskForm::numbers;
}

// The packed masks of a tile are those of its blocks in turn. Each has its form, then bits, then numbers if there is a bias.
static int64_t block_size(const Problem& p) { return 16 + (p.bias.data ? MASK_SCRATCH_FLOATS : MASK_BITS); }

static int64_t masks_size(const Problem& p) { return divide_up(p.keys, BLOCK) * block_size(p); }

template <int V>
INLINE TileMask read_packed(const Problem& p, const Tile& tile, int64_t start) {
    const float* block = tile.masks + start / BLOCK * block_size(p);
    TileMask mask = {};
    memcpy(&mask.form, block, sizeof mask.form);
    const int64_t skipped = start % BLOCK;
    if (mask.form == MaskForm::bits) mask.bits = reinterpret_cast<const uint32_t*>(block + 16) + skipped;
    if (mask.form == MaskForm::numbers) mask.numbers = block + 16 + MASK_BITS + skipped * V * LANES;
    return mask;
}

// The mask of a tile for the keys [start, stop), with a bias times `unit`. `memory` is for its bits and numbers.
template <int V>
static TileMask tile_mask(const Problem& p, const Tile& tile, int64_t batch, int64_t start, int64_t stop, float* memory,
                          float unit = LOG2E) {
    if (tile.masks) return read_packed<V>(p, tile, start);
    uint32_t* bits = reinterpret_cast<uint32_t*>(memory);
    MaskForm form = MaskForm::everything;
    bool marks = p.visible.data != nullptr;
    if (marks && p.visible.row == 0 && (tile.one_head || p.visible.head == 0)) {
        form = shared_marks(p, batch, tile.head[0], start, smaller(stop, p.keys));
        marks = form == MaskForm::bits;
    }
    const bool within = tile.highest_first <= start && tile.lowest_last >= stop;
    if (form != MaskForm::nothing && (marks || !within))
        form = marks ? bits_of_tile<V, true>(p, tile, batch, start, stop - start, bits)
                     : bits_of_tile<V, false>(p, tile, batch, start, stop - start, bits);
    if (form != MaskForm::bits) bits = nullptr;
    if (form == MaskForm::nothing || !(p.bias.data || p.table_buckets)) return {form, bits, nullptr};
    float* numbers = memory + MASK_BITS;
    if (p.table_buckets) return {tables_of_tile<V>(p, tile, start, stop, bits, numbers), nullptr, numbers};
    form = bias_of_tile<V>(p, tile, batch, start, stop, bits, numbers, unit);
    return {form, nullptr, numbers};
}

// Whether the packed masks of all tiles hide a block of keys.
template <class SomeTile>
INLINE bool are_packed_hidden(const Problem& p, const SomeTile* tiles, int64_t count, int64_t block) {
    for (int64_t n = 0; n < count; n++) {
        if (!tiles[n].masks) return false;
        MaskForm form;
        memcpy(&form, tiles[n].masks + block / BLOCK * block_size(p), sizeof form);
        if (form != MaskForm::nothing) return false;
    }
    return true;
}

template <int V>
static void pack_rows(const Problem& p, const Tile& tile, int64_t batch, float* to) {
    for (int64_t block = 0; block < p.keys; block += BLOCK, to += block_size(p)) {
        const int64_t end = block + round_up(smaller(BLOCK, p.keys - block), KEY_STEP);
        int64_t start = block, stop = end;
        trim(tile, start, stop);
        MaskForm form = MaskForm::nothing;
        if (start < stop) form = tile_mask<V>(p, tile, batch, block, end, to + 16).form;
        memcpy(to, &form, sizeof form);
    }
}

// Packs the masks of the tile from a folded row on for all blocks and any head.
[[maybe_unused]] static void pack_masks(const Problem& p, int64_t batch, int64_t row_start, float* to) {
    Tile tile;
    describe_rows(p, batch, 0, row_start, p.folded_rows(), tile);
    by_vectors(tile.vectors, [&](auto vectors) { pack_rows<vectors.value>(p, tile, batch, to); });
}

}  // namespace clearhead::ISA

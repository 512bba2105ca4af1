// The order of work in products of pairs. A unit is one tile of rows against a block of keys. A chunk is the keys that
// are packed together, for all tiles of a task. Chunks are the outer loop, then tiles, then blocks.
#pragma once
#include "tile_masks.h"

namespace clearhead::ISA {

template <class SomeTile>
struct Unit {
    SomeTile* tile = nullptr;
    int64_t start = 0, count = 0, within = 0;  // keys; the number of keys of the chunk before it
    int side = 0, slot = 0;                    // which of several buffers
    TileMask mask = {};                        // valid until the next unit

    bool masked() const { return mask.form != MaskForm::everything; }
};

constexpr int SIDES = 3;  // the current unit, the previous and the next may belong to different chunks

// Finds the units that are not fully masked. pack(first key, number of keys, number with padding, side)
template <class SomeTile, class Pack>
class Units {
  public:
    Units(const Problem& p, const Task& task, SomeTile* tiles, int64_t count, int64_t block, int64_t chunk,
          float* mask_memory, const Pack& pack)
        : p_(p), task_(task), tiles_(tiles), count_(count), tile_(count), size_(block), length_(chunk), masks_(mask_memory),
          pack_(pack) {
        int64_t first = p.keys;
        for (int64_t n = 0; n < count; n++) {
            first = smaller(first, tiles[n].lowest_first);
            stop_ = larger(stop_, tiles[n].highest_last);
        }
        chunk_ = first / block * block - chunk;
    }

    bool next(Unit<SomeTile>& unit) {
        for (;;) {
            if (block_ >= end_ && !next_tile()) return false;
            const int64_t start = block_, stop = smaller(start / size_ * size_ + size_, end_);
            block_ = stop;
            unit.mask = see(tiles_[tile_], start, stop);
            if (unit.mask.form == MaskForm::nothing) continue;
            if (!packed_) {
                side_ = (side_ + 1) % SIDES, packed_ = true;
                pack_(chunk_, smaller(length_, p_.keys - chunk_), padded_, side_);
            }
            slot_ = 1 - slot_;
            unit.tile = &tiles_[tile_], unit.side = side_, unit.slot = slot_;
            unit.start = start, unit.count = stop - start, unit.within = start - chunk_;
            return true;
        }
    }

  private:
    bool next_tile() {
        do {
            if (++tile_ >= count_ && !next_chunk()) return false;
            const Tile& tile = tiles_[tile_];
            block_ = larger(chunk_, tile.lowest_first / KEY_STEP * KEY_STEP);
            end_ = smaller(chunk_ + padded_, round_up(tile.highest_last, KEY_STEP));
        } while (block_ >= end_);
        return true;
    }

    bool next_chunk() {
        chunk_ += length_;
        if (chunk_ >= stop_ || count_ == 0) return false;
        tile_ = 0, padded_ = round_up(smaller(length_, p_.keys - chunk_), KEY_STEP);
        packed_ = false;  // until a row sees a key of it
        return true;
    }

    TileMask see(const Tile& tile, int64_t start, int64_t stop) const {
        TileMask mask;
        by_vectors(tile.vectors,
                   [&](auto vectors) { mask = tile_mask<vectors.value>(p_, tile, task_.batch, start, stop, masks_); });
        return mask;
    }

    const Problem& p_;
    const Task& task_;
    SomeTile* tiles_;
    int64_t count_, tile_, size_, length_, chunk_ = 0, padded_ = 0, block_ = 0, end_ = 0, stop_ = 0;
    float* const masks_;
    const Pack& pack_;
    bool packed_ = false;
    int side_ = 0, slot_ = 0;
};

}  // namespace clearhead::ISA

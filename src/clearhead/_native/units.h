// How products of pairs walk over their work. A unit is one tile of rows against a block of keys; a reach is the keys that
// are laid out at once, for all the tiles of a task: for each reach come the tiles, for each tile its blocks.

template <class Tile>
struct Unit {
    Tile* tile = nullptr;
    int64_t start = 0, count = 0, within = 0;  // keys; how many of its reach come before
    int side = 0, slot = 0;                    // of what lies in memory more than once
    Looked looked = {};                        // overwritten when the next unit is found

    bool masked() const { return looked.bits || looked.numbers; }
};

constexpr int SIDES = 3;  // a unit at work, the one before and the one behind it may be of as many reaches

// Finds those units that see anything. lay_out(key, how many there are, how many with those of zeros, side)
template <class Tile, class LayOut>
class Units {
  public:
    Units(const Problem& p, const Task& task, Tile* tiles, int64_t count, int64_t block, int64_t reach,
          const LookRoom& room, const LayOut& lay_out)
        : p_(p), task_(task), tiles_(tiles), count_(count), tile_(count), size_(block), length_(reach), room_(room),
          lay_out_(lay_out) {
        int64_t first = p.keys;
        for (int64_t n = 0; n < count; n++) {
            first = smaller(first, tiles[n].rows.lowest_first);
            stop_ = larger(stop_, tiles[n].rows.highest_last);
        }
        reach_ = first / block * block - reach;
    }

    bool next(Unit<Tile>& unit) {
        for (;;) {
            if (block_ >= end_ && !next_tile()) return false;
            const int64_t start = block_, stop = smaller(start / size_ * size_ + size_, end_);
            block_ = stop;
            unit.looked = see(tiles_[tile_].rows, start, stop);
            if (unit.looked.sight == Sight::nothing) continue;
            if (!laid_out_) {
                side_ = (side_ + 1) % SIDES, laid_out_ = true;
                lay_out_(reach_, smaller(length_, p_.keys - reach_), padded_, side_);
            }
            slot_ = 1 - slot_;
            unit.tile = &tiles_[tile_], unit.side = side_, unit.slot = slot_;
            unit.start = start, unit.count = stop - start, unit.within = start - reach_;
            return true;
        }
    }

  private:
    bool next_tile() {
        do {
            if (++tile_ >= count_ && !next_reach()) return false;
            const Rows& rows = tiles_[tile_].rows;
            block_ = larger(reach_, rows.lowest_first / KEY_STEP * KEY_STEP);
            end_ = smaller(reach_ + padded_, round_up(rows.highest_last, KEY_STEP));
        } while (block_ >= end_);
        return true;
    }

    bool next_reach() {
        reach_ += length_;
        if (reach_ >= stop_ || count_ == 0) return false;
        tile_ = 0, padded_ = round_up(smaller(length_, p_.keys - reach_), KEY_STEP);
        laid_out_ = false;  // which it is as soon as somebody sees anything of it
        return true;
    }

    Looked see(const Rows& rows, int64_t start, int64_t stop) const {
        Looked looked;
        by_vectors(rows.vectors,
                   [&](auto vectors) { looked = look<vectors.value>(p_, rows, task_.batch, start, stop, room_); });
        return looked;
    }

    const Problem& p_;
    const Task& task_;
    Tile* tiles_;
    int64_t count_, tile_, size_, length_, reach_ = 0, padded_ = 0, block_ = 0, end_ = 0, stop_ = 0;
    const LookRoom room_;
    const LayOut& lay_out_;
    bool laid_out_ = false;
    int side_ = 0, slot_ = 0;
};

// The forward pass of bfloat16 where the processor multiplies pairs of bfloat16. Scores and sums are float32 as ever. A
// weight is two numbers of bfloat16, its first eight bits and the next: with the first alone, outputs of values that
// cancel each other would be off by more than their own rounding.
//
// A unit of work is one tile of rows against PAIR_BLOCK keys. While its scores become weights, which takes the vector
// registers, tile registers multiply the weights of the unit before with their values and compute the scores of the next.

constexpr int PAIR_BLOCK = 64;   // keys of a unit: what it works on lies in the nearest cache
constexpr int PAIR_REACH = 512;  // keys that are laid out at once, for all the tiles of a task
constexpr float LEEWAY = 8;      // weights may grow to 2^LEEWAY before sums are scaled to a new peak

struct PairTile {
    Rows rows;
    Pair* query;    // (pairs of D × V·LANES)
    float* output;  // (Dv × V·LANES), height padded
    float peak[TILE], sum[TILE];
};

// What is there twice belongs to a unit and the next, or to a reach and the next.
struct PairRoom {
    Pair *keys, *values[2];  // (keys × pairs of D); for each block (Dv × its pairs of keys)
    float* scores[2];
    LookRoom look;
};

struct Unit {
    PairTile* tile = nullptr;
    int64_t start = 0, count = 0;
    const Pair *keys = nullptr, *values = nullptr;
    float* scores = nullptr;  // (keys × V·LANES); in the place of each two, a pair of weights and what it left out
    Looked looked = {};  // overwritten when the next unit is found

    bool masked() const { return looked.bits || looked.numbers; }
};

INLINE int64_t pairs_up(int64_t columns) { return round_up((columns + 1) / 2, PAIRS_AT_ONCE); }
INLINE int64_t height_up(int64_t columns) { return round_up(columns, ROWS_AT_ONCE); }

// Walks over the units of a task that see anything: for each reach of keys the tiles, for each tile its blocks.
class Units {
  public:
    Units(const Problem& p, const Task& task, PairTile* tiles, int64_t count, const PairRoom& room)
        : p_(p), task_(task), tiles_(tiles), count_(count), tile_(count), room_(room) {
        int64_t first = p.keys;
        for (int64_t n = 0; n < count; n++) {
            first = smaller(first, tiles[n].rows.lowest_first);
            stop_ = larger(stop_, tiles[n].rows.highest_last);
        }
        reach_ = first / PAIR_BLOCK * PAIR_BLOCK - PAIR_REACH;
    }

    // Calls finish() before anything is overwritten that the unit before the last one found may still need.
    template <class Finish>
    bool next(Unit& unit, const Finish& finish) {
        for (;;) {
            if (block_ >= end_ && !next_tile()) return false;
            const Rows& rows = tiles_[tile_].rows;
            const int64_t start = block_, stop = smaller(start / PAIR_BLOCK * PAIR_BLOCK + PAIR_BLOCK, end_);
            block_ = stop;
            unit.looked = see(rows, start, stop);
            if (unit.looked.sight == Sight::nothing) continue;
            if (!laid_out_) finish(), lay_out_reach();
            slot_ = !slot_;
            unit.tile = &tiles_[tile_], unit.start = start, unit.count = stop - start;
            unit.keys = keys_ + (start - reach_) * pairs_up(p_.dim);
            const int64_t height = height_up(p_.value_dim), within = start % PAIR_BLOCK;
            unit.values = room_.values[side_] + (start - within - reach_) / 2 * height + within / 2;
            unit.scores = room_.scores[slot_];
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
        reach_ += PAIR_REACH;
        if (reach_ >= stop_ || count_ == 0) return false;
        tile_ = 0, padded_ = round_up(smaller(PAIR_REACH, p_.keys - reach_), KEY_STEP);
        laid_out_ = false;  // which it is as soon as somebody sees anything of it
        return true;
    }

    void lay_out_reach() {
        const int64_t there = smaller(PAIR_REACH, p_.keys - reach_), pairs = pairs_up(p_.dim);
        side_ = !side_, laid_out_ = true;
        const BFloat16* keys = p_.key.at<BFloat16>(task_.batch, task_.kv_head, reach_);
        const bool aligned = reinterpret_cast<uintptr_t>(keys) % sizeof(Pair) == 0;
        if (aligned && p_.key.row == p_.dim && p_.dim == 2 * pairs && there == padded_) {
            keys_ = reinterpret_cast<const Pair*>(keys);  // they lie as they should
        } else {
            keys_ = room_.keys;
            copy_pairs(p_.key, task_.batch, task_.kv_head, reach_, there, p_.dim, pairs, padded_, room_.keys);
        }
        const int64_t height = height_up(p_.value_dim);
        for (int64_t block = 0; block < padded_; block += PAIR_BLOCK)
            transpose_pairs(p_.value, task_.batch, task_.kv_head, reach_ + block, there - block, p_.value_dim, height,
                            PAIR_BLOCK / 2, smaller(PAIR_BLOCK, padded_ - block), room_.values[side_] + block / 2 * height);
    }

    Looked see(const Rows& rows, int64_t start, int64_t stop) const {
        Looked looked;
        by_vectors(rows.vectors, [&](auto vectors) { looked = look<vectors.value>(p_, rows, task_.batch, start, stop, room_.look); });
        return looked;
    }

    const Problem& p_;
    const Task& task_;
    PairTile* tiles_;
    int64_t count_, tile_, reach_ = 0, padded_ = 0, block_ = 0, end_ = 0, stop_ = 0;
    const PairRoom& room_;
    const Pair* keys_ = nullptr;
    bool laid_out_ = false, side_ = false, slot_ = false;
};

INLINE Product scores_of(const Problem& p, const Unit& unit) {
    const int64_t pairs = pairs_up(p.dim);
    return {unit.keys, unit.tile->query, pairs, pairs, unit.count, unit.tile->rows.vectors, unit.scores, false};
}
INLINE Product outputs_of(const Problem& p, const Unit& unit) {
    const int64_t height = height_up(p.value_dim);
    const Pair* weights = reinterpret_cast<const Pair*>(unit.scores);
    return {unit.values, weights, PAIR_BLOCK / 2, unit.count / 2, height, unit.tile->rows.vectors, unit.tile->output, true};
}

static void finish_product(Product& product) {
    by_vectors(product.vectors, [&](auto v) { finish<v.value>(product); });
}

// Scores to units of log 2 in place, where more is to be done than multiplying them with a factor.
template <int V, Extra EXTRA>
static void adjust(const Problem& p, const Unit& unit) {
    const float scale = fabsf(p.scale);
    for (int64_t j = 0; j < unit.count; j++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float* score = unit.scores + (j * V + v) * LANES;
            Floats x = load(score);
            x = p.softcap != 0 ? tanh(x * (scale / p.softcap)) * (p.softcap * LOG2E) : x * (scale * LOG2E);
            store(score, masked<EXTRA, V>(x, unit.looked, j, v));
        }
}

// 2^x to 3e-6 for x <= LEEWAY, which is below the rounding of weights; zero below −126, NaN for NaN.
INLINE Floats exp2_of_weight(Floats x) {
    Floats f;
    const Floats power = whole_power(larger(splat(-127.f), x), f);
    Floats y = f * 0.00958285294f + 0.0559064262f;
    y = y * f + 0.240240991f;
    y = y * f + 0.693124175f;
    y = y * f + 1.f;
    return y * power;
}

// Scores to pairs of weights in their place, exp2(factor · score − peak), whose sums are added to `sums`.
template <int V, bool DROP, class Beside>
INLINE void exponentiate_pairs(const Problem& p, const Unit& unit, int64_t batch, float factor, const Floats (&peaks)[V],
                               Floats (&sums)[V], const Beside& beside) {
    for (int64_t j = 0; j < unit.count; j += GROUP)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Ints kept[GROUP];
            if (DROP) draw_kept(p, unit.tile->rows, batch, v, unit.start + j, kept);
            beside();
#pragma GCC unroll 4
            for (int t = 0; t < GROUP; t += 2) {
                float* scores = unit.scores + ((j + t) * V + v) * LANES;
                Floats x = exp2_of_weight(load(scores) * factor - peaks[v]);
                Floats y = exp2_of_weight(load(scores + V * LANES) * factor - peaks[v]);
                sums[v] += x + y;
                if (DROP) x = only_where(kept[t], x), y = only_where(kept[t + 1], y);
                const Words pair = pair_up(x, y), rest = pair_up(remainder(x), remainder(y));
                memcpy(scores, &pair, sizeof pair);
                memcpy(scores + V * LANES, &rest, sizeof rest);
            }
        }
}

// Scales what a tile has summed, with the outputs that are still due, to new peaks if some have risen too far.
template <int V>
INLINE void raise_peaks(const Problem& p, PairTile& tile, const Floats (&found)[V], Product& due) {
    Floats risen = splat(-INFINITY);
    for (int v = 0; v < V; v++) risen = larger(found[v] - load(tile.peak + v * LANES), risen);
    if (peak(risen) <= LEEWAY) return;
    finish_product(due);
    Floats fade[V];
    for (int v = 0; v < V; v++) {
        const Floats before = load(tile.peak + v * LANES), after = larger(found[v], before);
        fade[v] = exp2(before - after);
        store(tile.peak + v * LANES, after);
        store(tile.sum + v * LANES, load(tile.sum + v * LANES) * fade[v]);
    }
    const int64_t height = height_up(p.value_dim);
    for (int64_t d = 0; d < height; d++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float* output = tile.output + (d * V + v) * LANES;
            store(output, load(output) * fade[v]);
        }
}

// Makes the unit's scores weights, and takes steps of the two products beside it.
template <int V>
static void weigh_pairs(const Problem& p, const Unit& unit, int64_t batch, float factor, Product& outputs,
                        Product& scores) {
    PairTile& tile = *unit.tile;
    Floats peaks[V], sums[V];
    for (int v = 0; v < V; v++) peaks[v] = splat(LOWEST);
    for (int64_t j = 0; j < unit.count; j++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) peaks[v] = larger(load(unit.scores + (j * V + v) * LANES), peaks[v]);
    for (int v = 0; v < V; v++) peaks[v] *= factor;
    raise_peaks<V>(p, tile, peaks, outputs);
    const auto beside = [&] { step<V>(outputs.left_over() ? outputs : scores); };
    for (int v = 0; v < V; v++) peaks[v] = load(tile.peak + v * LANES), sums[v] = load(tile.sum + v * LANES);
    if (p.drop_below)
        exponentiate_pairs<V, true>(p, unit, batch, factor, peaks, sums, beside);
    else
        exponentiate_pairs<V, false>(p, unit, batch, factor, peaks, sums, beside);
    for (int v = 0; v < V; v++) store(tile.sum + v * LANES, sums[v]);
}

template <>
int64_t forward_scratch<BFloat16>(const Problem& p, int64_t task_rows) {
    const int64_t rows = round_up(task_rows, TILE), pairs = pairs_up(p.dim), height = height_up(p.value_dim);
    const int64_t of_reach = PAIR_REACH * (pairs + height), of_units = 2 * PAIR_BLOCK * TILE;
    return of_reach + of_units + LOOK_FLOATS + rows * (pairs + height) + 16 * (7 + 2 * MOST_TILES);
}

INLINE Pair* take_pairs(float*& scratch, int64_t count) { return reinterpret_cast<Pair*>(take(scratch, count)); }

static int64_t prepare_pairs(const Problem& p, const Task& task, PairTile* tiles, float*& scratch) {
    const int64_t pairs = pairs_up(p.dim), height = height_up(p.value_dim);
    int64_t count = 0;
    for (int64_t start = task.row_start; start < task.row_stop; start += TILE, count++) {
        PairTile& tile = tiles[count];
        describe_rows(p, task.batch, task.kv_head, start, task.row_stop, tile.rows);
        if (task.masks) tile.rows.masks = task.masks + count * masks_size(p);
        const int64_t lanes = tile.rows.vectors * LANES;
        tile.query = take_pairs(scratch, pairs * lanes);
        tile.output = take(scratch, height * lanes);
        // A negative scale turns the queries round, so that the largest product is always the largest score.
        rows_to_pairs(p.query, tile.rows, task.batch, p.dim, pairs, p.scale < 0, tile.query);
        memset(tile.output, 0, static_cast<size_t>(height * lanes) * sizeof(float));
        for (int lane = 0; lane < TILE; lane++) tile.peak[lane] = LOWEST, tile.sum[lane] = 0;
    }
    return count;
}

template <>
void forward_typed<BFloat16>(const Problem& p, const Task& task, float* scratch) {
    const int64_t pairs = pairs_up(p.dim), height = height_up(p.value_dim);
    PairRoom room;
    room.keys = take_pairs(scratch, PAIR_REACH * pairs);
    for (int side = 0; side < 2; side++) {
        room.values[side] = take_pairs(scratch, height * PAIR_REACH / 2);
        room.scores[side] = take(scratch, PAIR_BLOCK * TILE);
    }
    room.look = look_room(take(scratch, LOOK_FLOATS));
    PairTile tiles[MOST_TILES];
    const int64_t count = prepare_pairs(p, task, tiles, scratch);
    const TileRegisters registers;
    Units units(p, task, tiles, count, room);
    Unit now, next;
    Product scores = {}, outputs = {};
    const auto finish_outputs = [&] { finish_product(outputs); };
    bool more = units.next(now, finish_outputs);
    if (more) scores = scores_of(p, now);
    finish_product(scores);
    while (more) {
        const bool adjusted = p.softcap != 0 || now.masked();
        if (adjusted)
            by_vectors(now.tile->rows.vectors, [&](auto v) {
                by_extra(now.looked, [&](auto extra) { adjust<v.value, extra()>(p, now); });
            });
        const float factor = adjusted ? 1 : fabsf(p.scale) * LOG2E;
        more = units.next(next, finish_outputs);
        scores = more ? scores_of(p, next) : Product();
        by_vectors(now.tile->rows.vectors,
                   [&](auto v) { weigh_pairs<v.value>(p, now, task.batch, factor, outputs, scores); });
        finish_product(outputs);
        finish_product(scores);
        outputs = outputs_of(p, now);
        now = next;
    }
    finish_product(outputs);
    for (int64_t n = 0; n < count; n++) finish<BFloat16>(p, tiles[n], task.batch);
}

// Statistics of the weights, from a few sheets at a time:
//   1. scores against every key that a row sees, with the peaks of its pieces;
//   2. weights e^(s − peak) in place of the scores, their sums, and their product with the values;
//   3. sums over the rows of a sheet, now that each row's total is known.
// QKᵀ is computed once, and the weights leave the sheet only as what is asked for.

// Counts what each row sees and, in `viewers`, the counted rows that see each key of a part.
template <int V, Extra EXTRA>
static void count_visible(Sheet& sheet, int64_t count, const Looked& looked, float* viewers) {
    if (EXTRA == Extra::none) {
        float rows = 0;
        for (int64_t lane = 0; lane < sheet.tile.rows.count; lane++) rows += sheet.counted[lane];
        for (int lane = 0; lane < V * LANES; lane++) sheet.visible[lane] += static_cast<float>(count);
        for (int64_t j = 0; viewers && j < count; j++) viewers[j] += rows;
        return;
    }
    const auto where_seen = [&](int64_t j, int v, Floats x) {
        return masked<EXTRA, V>(Floats{}, looked, j, v) > splat(-INFINITY) ? x : Floats{};
    };
    Floats counted[V];
    for (int v = 0; v < V; v++) {
        Floats visible = load(sheet.visible + v * LANES);
        counted[v] = load(sheet.counted + v * LANES);
        for (int64_t j = 0; j < count; j++) visible += where_seen(j, v, splat(1.f));
        store(sheet.visible + v * LANES, visible);
    }
    if (viewers) add_columns<V>(count, viewers, [&](int64_t j, int v) { return where_seen(j, v, counted[v]); });
}

// The scores of a part and the peaks of its pieces.
template <int V, class T>
static void score_part(const Problem& p, Sheet& sheet, int64_t batch, const Part<T>& part, const LookRoom& room,
                       float* viewers) {
    const Looked looked = look<V>(p, sheet.tile.rows, batch, part.start, part.stop, room);
    sheet.seen[sheet.number(part.block)] = looked.sight != Sight::nothing;
    if (looked.sight == Sight::nothing) return;
    float* kept = sheet.peaks_of(part.block);
    const NextMasks none = {&sheet.tile.rows, batch, 0, 0};
    Floats best[V];
    for (int v = 0; v < V; v++) best[v] = load(sheet.tile.peak + v * LANES);
    for (int64_t j = 0; j < part.count(); j += PIECE, kept += V * LANES) {
        fetch_next(part.next, j, PIECE, part.count());
        Floats peaks[V];
        for (int v = 0; v < V; v++) peaks[v] = splat(-INFINITY);
        score_any<V>(p, sheet.tile, part.rows + j * p.dim, smaller(PIECE, part.count() - j), from_key<V>(looked, j),
                     none, sheet.at(part.start + j), peaks);
        for (int v = 0; v < V; v++) {
            store(kept + v * LANES, peaks[v]);
            best[v] = larger(peaks[v], best[v]);
        }
    }
    for (int v = 0; v < V; v++) store(sheet.tile.peak + v * LANES, best[v]);
    by_extra(looked, [&](auto extra) { count_visible<V, extra.value>(sheet, part.count(), looked, viewers); });
}

// Scores to weights, in place, after a last look for the largest of them. Sums are taken for each part first, so that
// none of them is long.
template <int V, class T>
static void weigh_part(Sheet& sheet, const Part<T>& part) {
    Floats peaks[V], sums[V], inner[V];
    for (int v = 0; v < V; v++) {
        peaks[v] = load(sheet.tile.peak + v * LANES);
        sums[v] = inner[v] = Floats{};
    }
    const float* peaks_of = sheet.peaks_of(part.block);
    const Floats lowest = splat(-127.f);  // where the weight is zero already, and zero times it is zero too
    for (int64_t j = 0; j < part.count(); j += GROUP) {
        float* scores = sheet.at(part.start + j);
        if (sheet.largest.count) find_largest<V>(sheet.largest, scores, peaks_of + j / PIECE * V * LANES, part.start + j);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Floats x[GROUP];
#pragma GCC unroll 8
            for (int t = 0; t < GROUP; t++) {
                float* place = scores + (t * V + v) * LANES;
                const Floats shifted = larger(lowest, load(place) - peaks[v]);  // in this order NaN stays NaN
                x[t] = exp2_within(shifted);
                inner[v] += x[t] * shifted;
                store(place, x[t]);
            }
            sums[v] += sum_of_group(x);  // as in the forward pass, so that outputs are the same to the bit
        }
    }
    for (int v = 0; v < V; v++) {
        store(sheet.tile.sum + v * LANES, load(sheet.tile.sum + v * LANES) + sums[v]);
        store(sheet.inner + v * LANES, load(sheet.inner + v * LANES) + inner[v]);
    }
}

// output += weights · values, of one part.
template <int V, class T>
static void mix_part(Sheet& sheet, const Part<T>& part, int64_t width) {
    const float* weights = sheet.at(part.start);
    for (int64_t d = 0; d < width; d += STEP) {
        fetch_next(part.next, d, STEP, width);
        Floats acc[STEP][V] = {};
        float* output = sheet.tile.output + d * V * LANES;
        multiply<false>(acc, part.rows + d, width, weights, V * LANES, part.count());
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* place = output + (t * V + v) * LANES;
                store(place, load(place) + acc[t][v]);
            }
    }
}

// Adds the sums of a run to the totals, and begins the next.
static void end_sheet_run(Sheet& sheet, int64_t floats) {
    end_run(sheet.tile, floats);
    for (int lane = 0; lane < TILE; lane++) sheet.total_inner[lane] += sheet.inner[lane], sheet.inner[lane] = 0;
    sheet.summed = 1;  // with the block that is about to be added
}

static void add_sheet_totals(Sheet& sheet, int64_t floats) {
    add_total(sheet.tile, floats);
    for (int lane = 0; lane < TILE; lane++) sheet.inner[lane] += sheet.total_inner[lane];
}

// What is known of each row once its sums are: in double, because it is a handful of numbers.
static void finish_rows(const Problem& p, const Statistics& s, Sheet& sheet, int64_t batch) {
    const Rows& rows = sheet.tile.rows;
    for (int64_t lane = 0; lane < rows.count; lane++) {
        const int64_t place = (batch * p.heads + rows.head[lane]) * p.rows + rows.row[lane];
        const double sum = sheet.tile.sum[lane], ln2 = LN_OF_2;
        const double peak = sum == 0 ? -INFINITY : sum != sum ? NAN : sheet.tile.peak[lane] * ln2;
        double share = sum == 0 ? 0 : 1 / sum, entropy = sum == 0 ? 0 : log(sum), lse = peak + entropy;
        if (p.sinks && sum != 0) {  // one more term of the total: with shift the larger of peak and sink,
            const double sink = p.sinks[rows.head[lane]], shift = peak < sink ? sink : peak;
            const double total = sum * exp(peak - shift) + exp(sink - shift);
            share = exp(peak - shift) / total;  // from e^(s − peak) to e^(s − shift), over the total
            lse = log(total) + shift;
            entropy = sum * share * (lse - peak);
        } else if (p.sinks) {
            lse = p.sinks[rows.head[lane]];
        }
        if (p.lse) p.lse[place] = lse;
        sheet.factor[lane] = static_cast<float>(share);
        if (s.largest) s.largest[place] = static_cast<float>(peak);
        if (s.visible) s.visible[place] = sheet.visible[lane];
        if (s.entropy) s.entropy[place] = static_cast<float>(entropy - sheet.inner[lane] * ln2 * share);
        if (s.confidence) s.confidence[place] = sheet.factor[lane];
    }
}

static int64_t width_of_output(const Problem& p) { return p.output.data ? round_up(p.value_dim, STEP) : 0; }

template <class T>
static void write_output(const Problem& p, const Statistics& s, const Sheet& sheet, int64_t batch) {
    const Rows& rows = sheet.tile.rows;
    lanes_to_rows<T>(sheet.tile.output, rows, batch, p.value_dim, sheet.factor, p.output);
    if (!s.norm) return;
    for (int64_t lane = 0; lane < rows.count; lane++) {
        double sum = 0;
        for (int64_t d = 0; d < p.value_dim; d++) {
            const double x = sheet.tile.output[d * rows.vectors * LANES + lane];
            sum += x * x;
        }
        const int64_t place = (batch * p.heads + rows.head[lane]) * p.rows + rows.row[lane];
        s.norm[place] = static_cast<float>(sqrt(sum)) * sheet.factor[lane];
    }
}

// Adds what each key of a part gets from the rows of a sheet, row by row in the lanes.
template <int V>
static void receive_part(const Sheet& sheet, int64_t start, int64_t stop, float* lanes) {
    Floats shares[V];
    for (int v = 0; v < V; v++) shares[v] = load(sheet.factor + v * LANES) * load(sheet.counted + v * LANES);
    const float* weights = sheet.at(start);
    for (int64_t j = 0; j < stop - start; j++, weights += V * LANES) {
        Floats x = load(lanes + j * LANES);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) x += load(weights + v * LANES) * shares[v];
        store(lanes + j * LANES, x);
    }
}

// Adds to some sums, and what is lost by rounding to their errors (Knuth's two-sum).
INLINE void add_with_error(Floats x, float* sums, float* errors) {
    const Floats before = load(sums), after = before + x, added = after - before;
    store(sums, after);
    store(errors, load(errors) + ((before - (after - added)) + (x - added)));
}

// What each key receives from the rows of some sheets, whose lanes are summed last.
static void receive(const Problem& p, const Sheet* sheets, int64_t count, const TaskSums& to) {
    for (int64_t block = 0; block < p.keys; block += BLOCK) {
        float lanes[BLOCK * LANES] = {};
        bool any = false;
        for (int64_t n = 0; n < count; n++) {
            const Sheet& sheet = sheets[n];
            const int64_t start = larger(block, sheet.start), stop = smaller(block + BLOCK, sheet.stop);
            if (start >= stop || !sheet.seen[sheet.number(block)]) continue;
            any = true;
            by_vectors(sheet.tile.rows.vectors, [&](auto v) {
                receive_part<v.value>(sheet, start, stop, lanes + (start - block) * LANES);
            });
        }
        for (int64_t j = 0; any && j < smaller(BLOCK, p.keys - block); j += LANES) {
            Floats square[LANES];
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++) square[t] = load(lanes + (j + t) * LANES);
            add_with_error(sums(square), to.received + block + j, to.lost + block + j);
        }
    }
}

static int64_t keys_of_sheet(const Problem& p) { return round_up(p.keys, BLOCK); }

static int64_t sheets_together(const Problem& p) {
    return larger(1, smaller(MOST_TILES, SHEET_FLOATS / (TILE * keys_of_sheet(p) + 1)));
}

// Floats of one sheet: scores, peaks, which blocks are seen, queries, outputs and lists of the largest.
static int64_t sheet_size(const Problem& p, const Statistics& s) {
    const int64_t keys = keys_of_sheet(p), pieces = keys / PIECE;
    return (keys + pieces + p.dim + 2 * width_of_output(p) + 4 * s.top + 32) * TILE + round_up(keys / BLOCK, 16);
}

static int64_t statistics_scratch(const Problem& p, const Statistics& s) {
    const int64_t block = (BLOCK + GROUP) * larger(p.dim, width_of_output(p)) + LOOK_FLOATS;
    return sheets_together(p) * sheet_size(p, s) + block + 64;
}

template <class T>
static void open_sheet(const Problem& p, const Statistics& s, const Task& task, int64_t row, float*& scratch,
                       Sheet& sheet) {
    const int64_t width = width_of_output(p), keys = keys_of_sheet(p), batch = task.batch;
    Rows& rows = sheet.tile.rows;
    describe_rows(p, batch, task.kv_head, row, task.row_stop, rows);
    sheet.start = smaller(p.keys, rows.lowest_first) / GROUP * GROUP;
    sheet.stop = larger(sheet.start, round_up(rows.highest_last, GROUP));
    sheet.scores = take(scratch, keys * TILE);
    sheet.peaks = take(scratch, keys / PIECE * TILE);
    sheet.seen = reinterpret_cast<int32_t*>(take(scratch, keys / BLOCK));
    sheet.tile.query = take(scratch, p.dim * TILE);
    sheet.tile.output = take(scratch, width * TILE);
    sheet.tile.total = has_totals(p) ? take(scratch, width * TILE) : nullptr;
    sheet.largest.count = s.top;
    sheet.largest.scores = take(scratch, sheet.largest.room() * TILE);
    sheet.largest.keys = reinterpret_cast<int32_t*>(take(scratch, sheet.largest.room() * TILE));
    rows_to_lanes<T>(p.query, rows, batch, p.dim, 1, sheet.tile.query);
    clear_sums(sheet.tile, width * TILE);
    sheet.summed = 0;
    for (int lane = 0; lane < TILE; lane++) {
        const bool there = lane < rows.count;
        sheet.inner[lane] = sheet.total_inner[lane] = sheet.visible[lane] = sheet.factor[lane] = 0;
        sheet.counted[lane] = there && (!s.counted || s.counted[batch * p.rows + rows.row[lane]]);
    }
}

// work(sheet, part) for the parts of all sheets, block by block, from the first or from the last. Rows that lie in
// memory as they are needed are read there; without `memory` none are.
template <class T, class Work>
static void each_block(const Problem& p, const View& view, int64_t columns, int64_t width, const Task& task,
                       Sheet* sheets, int64_t count, bool backwards, float* memory, const Work& work) {
    int64_t first = round_up(p.keys, BLOCK), last = 0;
    for (int64_t n = 0; n < count; n++) {
        if (sheets[n].start == sheets[n].stop) continue;
        first = smaller(first, sheets[n].first_block());
        last = larger(last, (sheets[n].stop - 1) / BLOCK * BLOCK);
    }
    const int64_t step = backwards ? -BLOCK : BLOCK;
    for (int64_t block = backwards ? last : first; first <= block && block <= last; block += step) {
        const int64_t end = smaller(block + BLOCK, p.keys), padded = round_up(end - block, GROUP), next = block + step;
        const T* there = view.at<T>(task.batch, task.kv_head, block);
        const float* rows = in_place(there, view.row == width && columns == width && end - block == padded);
        if (memory && !rows) {
            widen_rows(there, view.row, end - block, columns, memory, width, padded);
            rows = memory;
        }
        for (int64_t n = 0; n < count; n++) {
            Part<T> part = {larger(block, sheets[n].start), smaller(block + padded, sheets[n].stop), block};
            if (part.start >= part.stop) continue;
            if (memory) part.rows = rows + (part.start - block) * width;
            if (memory && first <= next && next <= last) {
                const int64_t rows_there = smaller(BLOCK, p.keys - next), share = rows_there * n / count;
                part.next = {there + (step + share) * view.row, view.row, columns, rows_there * (n + 1) / count - share};
            }
            work(sheets[n], part);
        }
    }
}

// The rows of some sheets from their queries to all that is asked for. The second walk over the keys goes backwards:
// it begins with what the first has left in the cache.
template <class T>
static void work_through(const Problem& p, const Statistics& s, const Task& task, Sheet* sheets, int64_t count,
                         const TaskSums& sums, float* block_rows, const LookRoom& room) {
    const int64_t b = task.batch, width = width_of_output(p), run = run_length(keys_of_sheet(p) / BLOCK);
    const auto score = [&](Sheet& sheet, const Part<T>& part) {
        float* seen_by = sums.viewers ? sums.viewers + part.start : nullptr;
        by_vectors(sheet.tile.rows.vectors, [&](auto v) { score_part<v.value>(p, sheet, b, part, room, seen_by); });
    };
    const auto weigh = [&](Sheet& sheet, const Part<T>& part) {
        if (!sheet.seen[sheet.number(part.block)]) return;
        if (sheet.summed++ == run) end_sheet_run(sheet, width * sheet.tile.rows.vectors * LANES);
        by_vectors(sheet.tile.rows.vectors, [&](auto v) {
            weigh_part<v.value>(sheet, part);
            if (width) mix_part<v.value>(sheet, part, width);
        });
    };
    each_block<T>(p, p.key, p.dim, p.dim, task, sheets, count, false, block_rows, score);
    for (int64_t n = 0; s.top && n < count; n++) expect_largest(sheets[n]);
    each_block<T>(p, p.value, p.value_dim, width, task, sheets, count, true, width ? block_rows : nullptr, weigh);
    for (int64_t n = 0; n < count; n++) {
        add_sheet_totals(sheets[n], width * sheets[n].tile.rows.vectors * LANES);
        finish_rows(p, s, sheets[n], b);
        if (s.top) write_largest(p, s, sheets[n], b);
        if (width) write_output<T>(p, s, sheets[n], b);
        by_vectors(sheets[n].tile.rows.vectors, [&](auto v) {
            if (s.weights.data) write_weights<v.value>(p, s, sheets[n], b);
            if (sums.map) pool<v.value>(p, s, sheets[n], sums);
        });
    }
    if (sums.received) receive(p, sheets, count, sums);
}

template <class T>
static void statistics_typed(const Problem& p, const Statistics& s, const Task& task, const TaskSums& sums,
                             float* scratch) {
    const int64_t together = sheets_together(p);
    float* block_rows = take(scratch, (BLOCK + GROUP) * larger(p.dim, width_of_output(p)));
    const LookRoom room = look_room(take(scratch, LOOK_FLOATS));
    for (int64_t row = task.row_start; row < task.row_stop;) {
        Sheet sheets[MOST_TILES];
        float* rest = scratch;
        int64_t count = 0;
        for (; count < together && row < task.row_stop; count++, row += TILE)
            open_sheet<T>(p, s, task, row, rest, sheets[count]);
        work_through<T>(p, s, task, sheets, count, sums, block_rows, room);
    }
}

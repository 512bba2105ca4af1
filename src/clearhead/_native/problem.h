// One attention request as the Python side hands it over: pointers, sizes and strides (in elements), nothing of torch.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>

// Compilers that know AVX-512-BF16's functions and AMX's instructions, and take target options from a pragma.
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define COMPILES_PAIRS
#if defined(__linux__)
#define COMPILES_AMX
#endif
#endif

namespace clearhead {

enum class Type : int64_t { float32, bfloat16, float16 };

constexpr int MOST_TILES = 16;  // of one task: they share a block's keys and values while these are in the cache

// Long sums are sums of runs: blocks are added one by one to the sum of their run, runs to the total. With √n blocks in
// each, rounding errors grow with √n and not with n.
constexpr int64_t RUN = 32;  // fewer blocks need no total

inline int64_t run_length(int64_t blocks, int64_t least = RUN) {
    const int64_t root = static_cast<int64_t>(sqrt(static_cast<double>(blocks)));
    return root < least ? least : root;
}

// (batch, head, row, column); columns of matrices are contiguous, those of masks need not be.
struct View {
    void* data = nullptr;
    int64_t batch = 0, head = 0, row = 0, column = 1;

    template <class T>
    T* at(int64_t b, int64_t h, int64_t i) const {
        return static_cast<T*>(data) + b * batch + h * head + i * row;
    }
};

// What the backward pass finds of a row: the sum of ds over its keys without the one whose weight is above one half,
// which one that is or −1, and the slope of the soft-cap at its score.
struct HeavyKey {
    double light_sum;
    int64_t key;
    float slope;
};

struct Problem {
    Type type;
    int64_t batch, heads, kv_heads, rows, keys, dim, value_dim;
    float scale, softcap;  // softcap 0: none
    double exact_scale, exact_softcap;  // the same, for scores in double precision
    View query, key, value, output;
    bool wide_output;    // the output is float32 whatever the type
    double* lse;         // (B, H, L), natural logarithm; null in a forward pass that does not return it
    int64_t lse_batch, lse_head;  // strides of everything (B, H, L)
    const float* sinks;  // (H), or null

    // Row i sees column j where i + low <= j <= i + high, j < stop, and first <= j < last if there are such arrays.
    int64_t low, high, stop;
    const int32_t *first, *last;
    int64_t span_batch, span_row;
    View visible;  // bytes, or null
    View bias;     // float32, or null

    uint32_t drop_below;  // of 65536; 0 drops nothing
    uint64_t seed;
    // Of the call that this is a part of, by which dropout counts: its heads, and where this begins in it.
    int64_t all_heads, first_item, first_head, first_row, first_key;
    float kept_factor;

    // Of the backward pass.
    bool few;  // whether the forward pass was `decode`
    View output_gradient, exact_output;  // exact_output: float32
    View query_gradient, key_gradient, value_gradient;
    View bias_gradient;         // float32, zero at first, every head its own rows and columns side by side; or null
    const float* lse_gradient;  // (B, H, L), or null
    float* correction;          // (B, H, L): δ − dl
    bool whole_rows = true;     // whether lse is of the keys of this call
    HeavyKey* heavy_keys = nullptr;  // (B, H, L), to be written where others add what heavy keys contribute; or null

    int64_t bytes() const { return type == Type::float32 ? 4 : 2; }
    int64_t row_place(int64_t b, int64_t h, int64_t i) const { return b * lse_batch + h * lse_head + i; }
    int64_t group() const { return heads / kv_heads; }
    // Σ_j ds of a row that sees a key; NaN where δ is not finite.
    double sum_of_score_gradients(int64_t b, int64_t h, int64_t i) const {
        const int64_t place = row_place(b, h, i);
        const double of_lse = lse_gradient ? lse_gradient[place] : 0, delta = correction[place] + of_lse;
        const double of_sink = sinks ? exp(sinks[h] - lse[place]) : 0;
        return isfinite(delta) ? of_sink * delta + (1 - of_sink) * of_lse : NAN;
    }
    // Rows of all the query heads that share a key/value head.
    int64_t folded_rows() const { return group() * rows; }
};

// What is wanted of the weights; what is null is not.
struct Statistics {
    const uint8_t* counted;      // (B, L): the queries that sums over queries take in; null for all
    float *largest, *visible;    // (B, H, L): the largest score, −∞ where nothing is seen; how many keys are seen
    float* raw;                  // (B, H, L): the largest scale · q·k of what is seen, before soft-cap and bias
    float *entropy, *confidence; // (B, H, L)
    float* norm;                 // (B, H, L), of outputs that are written too
    float *received, *viewers;   // (B, H, S), both or neither
    float* top_weights;          // (B, H, L, top)
    int64_t *top_keys, top;
    View weights;         // float32 (B, H, L, S), zero at first; heads of stride 0 add up to their mean
    float* map;           // (B, H, map_rows, map_columns), zero at first: row i goes to tile i · map_rows / L, and so do keys
    int64_t map_rows, map_columns;
    bool map_max;       // the largest weight of a tile instead of the sum of what counted rows give it
    float* sink;        // (B, H, L): the sum of the weights of some keys
    const int32_t* first_keys;  // (B, H, sink_keys): which keys; −1 is none
    int64_t sink_keys;
    float* distance;  // (B, H, L): Σ p |i + shift − j|
    float* stripes;   // (B, H, L, offset_count): the weight of key i + shift + offset, −1 where the row sees no such key
    const int64_t* offsets;
    int64_t offset_count, shift;
    bool exact;       // scores in double precision; for rows whose scores fit the cache

    bool averages(const Problem& p) const { return weights.data && weights.head == 0 && p.heads > 1; }
    int64_t map_row(const Problem& p, int64_t row) const { return row * map_rows / p.rows; }
};

// Sums over the rows of one task, which are of one query head; null where they are not wanted.
struct TaskSums {
    float *received, *lost;  // what its keys receive from them, and the rounding errors of these sums
    float* viewers;          // how many of them see each key
    double* map;             // rows of the map from the one on that the task's first row goes to
    int64_t first_map_row;
};

// A piece of work: folded rows [row_start, row_stop) of one key/value head against keys [key_start, key_stop) (which only decoding splits).
struct Task {
    int64_t batch, kv_head, row_start, row_stop, key_start, key_stop;
    const float* masks;  // packed for its tiles, or null
};

// Received or viewers of a task have so many numbers, the last of which mean nothing: whole vectors are written.
inline int64_t columns_of(const Problem& p) { return p.keys + 16; }

// One instruction set's functions. Scratch is counted in floats and aligned to 64 bytes.
struct Kernels {
    const char* name;
    int64_t tile_rows;
    bool (*supported)();
    int64_t (*masks_size)(const Problem&);  // of a tile, packed
    void (*pack_masks)(const Problem&, int64_t batch, int64_t row_start, float* to);
    int64_t (*forward_scratch)(const Problem&, int64_t task_rows);
    void (*forward)(const Problem&, const Task&, float* scratch);
    int64_t (*decode_scratch)(const Problem&);
    int64_t (*partial_size)(const Problem&);
    void (*decode)(const Problem&, const Task&, float* partial, float* scratch);
    void (*merge)(const Problem&, int64_t batch, int64_t kv_head, float* partials, int64_t count);
    int64_t (*backward_scratch)(const Problem&, int64_t task_rows);
    int64_t (*sums_size)(const Problem&);
    void (*backward)(const Problem&, const Task&, float* sums, float* scratch);
    void (*write_sums)(const Problem&, int64_t batch, int64_t kv_head, const float* sums, int64_t count);
    int64_t (*statistics_scratch)(const Problem&, const Statistics&);
    void (*statistics)(const Problem&, const Statistics&, const Task&, const TaskSums&, float* scratch);
    bool pairs = false;  // whether the forward pass multiplies bfloat16 in pairs
};

// Tables are constants: code of an instruction set must not run when the module is loaded, on whatever processor.
extern const Kernels avx512_kernels, avx2_kernels, neon_kernels, generic_kernels;

// What an instruction set with products of bfloat16 pairs does otherwise than plain AVX-512.
struct PairKernels {
    const char* name;
    bool (*supported)();
    int64_t (*forward_scratch)(const Problem&, int64_t task_rows);
    void (*forward)(const Problem&, const Task&, float* scratch);
    int64_t (*backward_scratch)(const Problem&, int64_t task_rows);
    void (*backward)(const Problem&, const Task&, float* sums, float* scratch);
};

extern const PairKernels amx_pairs, avx512_bf16_pairs;

}  // namespace clearhead

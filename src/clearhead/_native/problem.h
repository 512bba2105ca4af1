// One attention call as Python passes it: pointers, sizes and strides (in elements), without PyTorch's types.
// Sources of instruction sets include this before their target pragma, because library headers are for every processor.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <numeric>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Compilers that support AVX-512-BF16, AMX and target options in a pragma.
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define COMPILES_PAIRS
#if defined(__linux__)
#define COMPILES_AMX
#endif
#endif

// Internal linkage: the linker must not merge copies that are compiled for different instruction sets.
#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

namespace clearhead {

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t x, int64_t step) { return divide_up(x, step) * step; }

#define TYPE_NAMES float32, bfloat16, float16
enum Type : int64_t { TYPE_NAMES };

constexpr int MOST_TILES = 16;  // of one task, which share a block's keys and values in the cache

// Long sums are sums of runs. Blocks are added to the sum of their run, and runs are added to the total. With √n blocks
// in each run, rounding errors grow with √n and not with n.
constexpr int64_t RUN = 32;  // fewer blocks need no total

inline int64_t run_length(int64_t blocks, int64_t least = RUN) {
    return larger(least, static_cast<int64_t>(sqrt(static_cast<double>(blocks))));
}

// (batch, head, row, column). Columns of matrices are contiguous. Columns of masks may have any stride.
struct View {
    void* data = nullptr;
    int64_t batch = 0, head = 0, row = 0, column = 1;

    template <class T>
    T* at(int64_t b, int64_t h, int64_t i) const {
        return static_cast<T*>(data) + b * batch + h * head + i * row;
    }
    // The same of numbers of so many bytes.
    char* address(int64_t b, int64_t h, int64_t i, int64_t bytes) const {
        return static_cast<char*>(data) + (b * batch + h * head + i * row) * bytes;
    }
};

// The heavy key of a row is the key with a weight above one half, or −1. The struct also holds the sum of ds over the
// other keys, and the slope of the soft-cap at the score of the heavy key.
struct HeavyKey {
    double light_sum;
    int64_t key;
    float slope;
};

// The keys from `start` on, up to `stop`.
struct KeyRange {
    int64_t start, stop;
};

// Row i sees column j where i + low <= j <= i + high, j < stop, and first <= j < last if there are such arrays. They may
// lie outside the columns.
struct RowRanges {
    int64_t rows, keys, low, high, stop;
    const int64_t *first, *last;  // or null
    int64_t range_batch, range_row;

    // The visible columns of a row. Start and stop are equal if it sees none.
    KeyRange range(int64_t batch, int64_t row) const {
        int64_t start = larger(0, row + low), end = smaller(smaller(keys, stop), row + high + 1);
        const int64_t place = batch * range_batch + row * range_row;
        if (first) start = larger(start, first[place]);
        if (last) end = smaller(end, last[place]);
        end = larger(0, end);
        return {smaller(start, end), end};
    }
};

// The place of a call in a larger one, which has `num_heads` heads.
struct Offset {
    int64_t num_heads, head, row, column, item;
};

// One half of a bias that depends on content and distance: each token on one side of the scores (a query, or a key) has a
// number x · vectors[bucket] for each bucket, and a token on the other side reads that of its distance.
struct BucketTable {
    const float* vectors;     // (H, buckets, D padded to TABLE_STEP), or null: no such half
    float* vectors_gradient;  // (groups, H, buckets, D padded), zero at first
    // Of the head that is computed: (buckets, tokens), with TABLE_STEP tokens more on both sides that are never meant.
    float *numbers, *gradient;
    int64_t stride;  // of a bucket

    const float* number(int64_t bucket, int64_t token) const { return numbers + bucket * stride + token; }
    float* of_number(int64_t bucket, int64_t token) const { return gradient + bucket * stride + token; }
};

constexpr int64_t TABLE_STEP = 16;  // the numbers of buckets, and rows in scratch memory, are multiples of it

struct Problem : RowRanges {
    Type type;
    int64_t threads;
    int64_t batch, heads, kv_heads, dim, value_dim;
    float scale, softcap;  // softcap 0: none
    double exact_scale, exact_softcap;  // the same, for scores in double precision
    View query, key, value, output;
    bool wide_output;    // the output is float32 whatever the type
    double* lse;         // (B, H, L), natural logarithm; null in a forward pass that does not return it
    int64_t lse_batch, lse_head;  // strides of everything (B, H, L)
    const float* sinks;  // (H), or null
    bool row_sinks;      // whether they are (B, H, L)
    View visible;        // bytes, or null
    View bias;           // float32, or null

    // Row i sees only the keys of the blocks selected_i[0 … selected_count), in any order; −1 is none.
    View selected;  // int32, numbers of blocks of `selected_block` keys, or null; the heads divide those of the queries
    int64_t selected_heads, selected_count, selected_block;

    // Packed sequences in a batch of one. Rows [cu_seqlens_q[d], cu_seqlens_q[d + 1]) are those of sequence d. They see only
    // the keys [cu_seqlens_k[d], cu_seqlens_k[d + 1]). Masks and dropout count within a sequence, as if it were item d of a
    // batch.
    int64_t sequences;  // 0: a batch
    const int64_t *cu_seqlens_q, *cu_seqlens_k;

    uint32_t drop_below;  // of 65536; 0 drops nothing
    uint64_t seed;
    Offset offset;  // for dropout
    float kept_factor;

    // Of the backward pass.
    bool few;  // whether the forward pass was `decode`
    View output_gradient, exact_output;  // exact_output: float32
    View query_gradient, key_gradient, value_gradient;
    View bias_gradient;         // float32, zero at first, every head its own rows and columns side by side; or null
    const float* lse_gradient;  // (B, H, L), or null
    float* correction;          // (B, H, L): δ − dl
    bool whole_rows = true;     // whether lse covers only the keys of this call
    HeavyKey* heavy_keys = nullptr;  // (B, H, L), for a caller that adds the gradients of heavy keys itself; or null

    // bias_ij = query_table[bucket of i − j, i] + key_table[bucket of i − j, j], in float32 with one query head per key head.
    int64_t table_buckets;  // 0: no such bias
    int64_t table_groups;   // batch items or sequences are split into groups, which threads compute side by side
    const int32_t* bucket_of;  // the distance i − j, rising; at distance 0
    BucketTable query_table, key_table;

    int64_t bytes() const { return type == Type::float32 ? 4 : 2; }
    int64_t row_place(int64_t b, int64_t h, int64_t i) const { return b * lse_batch + h * lse_head + i; }
    int64_t group() const { return heads / kv_heads; }
    // A sink of −∞ is none: its weight is 0 beside any score, and in the softmax of a fully masked row it is the only term.
    double sink(int64_t b, int64_t h, int64_t i) const {
        const float logit = sinks[row_sinks ? row_place(b, h, i) : h];
        return logit < -1e38f ? -1e38f : logit;
    }
    // Σ_j ds of a row that is not fully masked. NaN if δ is not finite.
    double sum_of_score_gradients(int64_t b, int64_t h, int64_t i) const {
        const int64_t place = row_place(b, h, i);
        const double of_lse = lse_gradient ? lse_gradient[place] : 0, delta = correction[place] + of_lse;
        const double of_sink = sinks ? exp(sink(b, h, i) - lse[place]) : 0;
        return isfinite(delta) ? of_sink * delta + (1 - of_sink) * of_lse : NAN;
    }
    // Query heads whose rows see the same keys of one head, which are gathered for all of them.
    int64_t heads_together() const {
        if (visible.head || bias.head) return 1;
        return std::gcd(group(), heads / larger(1, selected_heads));
    }
    // The most keys that a row has selected.
    int64_t most_selected() const { return smaller(keys, selected_count * selected_block); }
    // Rows of all query heads that share a key/value head.
    int64_t folded_rows() const { return group() * rows; }
};

// Statistics of the weights. Those with a null pointer are not computed.
struct Statistics {
    const uint8_t* counted;      // (B, L): the queries that sums over queries include; null for all
    float *largest, *visible;    // (B, H, L): the largest score, −∞ for a fully masked row; the number of visible keys
    float* raw;                  // (B, H, L): the largest scale · q·k of visible keys, before soft-cap and bias
    float *entropy, *confidence; // (B, H, L)
    float* norm;                 // (B, H, L), of the outputs, which must be computed too
    float *received, *viewers;   // (B, H, S), both or neither
    float* top_weights;          // (B, H, L, top)
    int64_t *top_keys, top;
    View weights;         // float32 (B, H, L, S), zero at first; heads of stride 0 add up to their mean
    float* map;           // (B, H, map_rows, map_columns), zero at first: row i goes to tile i · map_rows / L, and so do keys
    int64_t map_rows, map_columns;
    bool map_max;       // the largest weight of a tile instead of the sum over counted rows
    float* sink;        // (B, H, L): the sum of the weights of some keys
    const int32_t* first_keys;  // (B, H, sink_keys): which keys; −1 is none
    int64_t sink_keys;
    float* distance;  // (B, H, L): Σ p |i + shift − j|
    float* stripes;   // (B, H, L, offset_count): the weight of key i + shift + offset, −1 if it is not visible
    const int64_t* offsets;
    int64_t offset_count, shift;
    float* mass;      // (mass_count, B, H, L): Σ p over the keys of the row's label from i + low to i + high
    const int64_t* mass_ranges;  // (mass_count, 3): low, high, and whether labels count
    const int32_t *query_labels, *key_labels;  // (mass_count, B, L) and (mass_count, B, S)
    int64_t mass_count;
    bool exact;       // scores in double precision; for rows whose scores fit the cache

    bool averages(const Problem& p) const { return weights.data && weights.head == 0 && p.heads > 1; }
    int64_t map_row(const Problem& p, int64_t row) const { return row * map_rows / p.rows; }
};

// Sums over the rows of one task of one query head. Sums that are not computed are null.
struct TaskSums {
    float *received, *lost;  // Σ p of each key, and the rounding errors of these sums
    float* viewers;          // the number of rows that see each key
    double* map;             // the map, of which the task writes some rows
};

// Folded rows [row_start, row_stop) of one key/value head against keys [key_start, key_stop). Only decoding splits keys.
// Of selected keys: rows of all heads that share them, the first of which is `kv_head`, and part key_start of key_stop.
struct Task {
    int64_t batch, kv_head, row_start, row_stop, key_start, key_stop;
    const float* masks;  // packed for its tiles, or null
};

// The length of `received` and `viewers` of a task, including padding for vector writes.
inline int64_t columns_of(const Problem& p) { return p.keys + 16; }

// x ← norm(x + residual) of rows side by side, and total ← x + residual. Residual, total, weight and bias may be null.
struct RowNorm {
    Type type;  // of x, residual and total
    int64_t threads, rows, features;
    void* x;
    const void* residual;
    void* total;
    const float *weight, *bias;
    double epsilon;
    bool centers;  // LayerNorm; otherwise RMSNorm
};

// Rotary positions of the heads of each row, in place. Strides in elements. Row i has the position i modulo `positions`.
struct Rotation {
    Type type;
    int64_t threads, rows, heads, dim, row, head, positions;
    void* x;
    const float *cosine, *sine;  // (positions, dim)
};

// y = f(x Wᵀ + b) of few rows: x (rows × inner), W (outer × inner), b (outer), which may be null, and y (rows × outer).
#define ACTIVATION_NAMES identity, relu, tanh, gelu, gelu_tanh, silu
enum class Activation : int64_t { ACTIVATION_NAMES };
struct Affine {
    Type type;  // of all four
    int64_t threads, rows, inner, outer;
    const void *x, *weight, *bias;
    void* y;
    Activation activation;
};

// to (rows × columns) = left (rows × count) · right (count × columns), or += with `add`. Rows of `left` lie `left_stride`
// apart if `along`, else its columns do. Rows and columns are multiples of TABLE_STEP.
struct Multiplication {
    const float* left;
    int64_t left_stride;
    bool along;
    const float* right;
    int64_t right_stride, count, rows, columns;
    float* to;
    int64_t to_stride;
    bool add;
};

// to (columns × rows, which lie `stride` apart) = fromᵀ
struct Transposition {
    int64_t threads, rows, columns;
    const float* from;
    float* to;
    int64_t stride;
};

// One instruction set's functions, some of them by type. Scratch is counted in floats and aligned to 64 bytes.
struct Kernels {
    const char* name;
    int64_t tile_rows;
    bool (*supported)();
    int64_t (*masks_size)(const Problem&);  // of a tile, packed
    void (*pack_masks)(const Problem&, int64_t batch, int64_t row_start, float* to);
    int64_t (*forward_scratch)(const Problem&, int64_t task_rows);
    void (*forward[3])(const Problem&, const Task&, float* scratch);
    int64_t (*decode_scratch)(const Problem&);
    int64_t (*partial_size)(const Problem&);
    void (*decode[3])(const Problem&, const Task&, float* partial, float* scratch);
    void (*merge[3])(const Problem&, int64_t batch, int64_t kv_head, float* partials, int64_t count);
    int64_t (*backward_scratch)(const Problem&, int64_t task_rows);
    int64_t (*sums_size)(const Problem&);
    void (*backward[3])(const Problem&, const Task&, float* sums, float* scratch);
    void (*write_sums[3])(const Problem&, int64_t batch, int64_t kv_head, const float* sums, int64_t count);
    int64_t (*statistics_scratch)(const Problem&, const Statistics&);
    void (*statistics[3])(const Problem&, const Statistics&, const Task&, const TaskSums&, float* scratch);
    void (*norm_rows[3])(const RowNorm&, int64_t start, int64_t stop, float* scratch);
    void (*rotate_rows[3])(const Rotation&, int64_t start, int64_t stop);
    void (*affine_columns[3])(const Affine&, int64_t start, int64_t stop, float* scratch);
    int64_t (*gathered_rows)(const Problem&);  // of one task
    int64_t (*gathered_scratch)(const Problem&);
    int64_t (*gathered_partial)(const Problem&);  // of a row
    void (*gather[3])(const Problem&, const Task&, float* partials, float* scratch);
    void (*merge_gathered[3])(const Problem&, int64_t batch, int64_t head, int64_t row, const float* partials, int64_t count);
    int64_t (*gathered_back_scratch)(const Problem&);
    void (*gather_back[3])(const Problem&, const Task&, float* sums, float* scratch);
    int64_t (*gathered_statistics_scratch)(const Problem&);
    void (*gather_statistics[3])(const Problem&, const Statistics&, const Task&, const TaskSums&, float* scratch);
    bool pairs;  // whether the forward pass of bfloat16 multiplies pairs
    void (*multiply)(const Multiplication&);
    void (*transpose_columns)(const Transposition&, int64_t start, int64_t stop);
};

// Tables are constants, because code of an instruction set must not run when the module is loaded.
extern const Kernels avx512_kernels, avx2_kernels, neon_kernels, generic_kernels;

// These have only functions of bfloat16. Everything else is AVX-512's.
extern const Kernels amx_pairs, avx512_bf16_pairs;

// Cut a problem into tasks and run them on the threads. Throw std::bad_alloc without memory. NaN in fully masked rows, and
// in keys that are masked for every row, reaches no result.
void run_forward(const Kernels& kernels, const Problem& problem);
void run_backward(const Kernels& kernels, const Problem& problem);
void run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted);

void run_norm(const Kernels& kernels, const RowNorm& norm);
void run_rotation(const Kernels& kernels, const Rotation& rotation);
void run_affine(const Kernels& kernels, const Affine& affine);
void run_transposition(const Kernels& kernels, const Transposition& transposition);

// A number that depends on the 32-bit words at these addresses.
uint64_t digest(const int64_t* addresses, int64_t count);

// The instruction sets of this build, those with more features first.
extern const Kernels* const INSTRUCTION_SETS[];
extern const int64_t INSTRUCTION_SET_COUNT;

// On processors with tile registers `vdpbf16ps` is slow, and float32 is 1.6 times as fast (measured). Processors without
// tile registers run it at full rate. CPUID does not report throughput.
bool pairs_are_slow();

}  // namespace clearhead

#include "parallel.h"

namespace clearhead {
namespace {

constexpr int64_t FEWEST_NUMBERS = 32 * 1024;  // of a thread's part of a pass: fewer take less time than waking a thread

// Calls work(start, stop, scratch) for parts of the rows.
template <class Work>
void in_parts(int64_t rows, int64_t width, int64_t threads, int64_t floats, const Work& work) {
    const int64_t parts = larger(1, smaller(4 * threads, rows * width / FEWEST_NUMBERS));
    const int64_t step = divide_up(rows, parts);
    parallel_for(divide_up(rows, step), threads, floats, [&](int64_t part, float* scratch) {
        work(part * step, smaller(rows, (part + 1) * step), scratch);
    });
}

}  // namespace

void run_norm(const Kernels& kernels, const RowNorm& n) {
    if (n.rows == 0) return;
    in_parts(n.rows, n.features, n.threads, n.features + 16, [&](int64_t start, int64_t stop, float* scratch) {
        kernels.norm_rows[n.type](n, start, stop, scratch);
    });
}

void run_rotation(const Kernels& kernels, const Rotation& r) {
    if (r.rows == 0) return;
    in_parts(r.rows, r.heads * r.dim, r.threads, 16, [&](int64_t start, int64_t stop, float*) {
        kernels.rotate_rows[r.type](r, start, stop);
    });
}

uint64_t digest(const int64_t* addresses, const int64_t* bytes, int64_t tensors) {
    constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15u;
    uint64_t result = 0, draw = 1;
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        const uint64_t words = static_cast<uint64_t>(bytes[tensor]) / 4;
        const char* from = reinterpret_cast<const char*>(addresses[tensor]);
        const uint64_t samples = words < DIGEST_SAMPLES ? words : DIGEST_SAMPLES;
        for (uint64_t sample = 0; sample < samples; sample++) {
            draw = draw * FACTOR + 1;
            // One word of each of so many equal parts.
            const uint64_t start = sample * words / samples, stop = (sample + 1) * words / samples;
            uint32_t word;
            memcpy(&word, from + 4 * (start + (draw >> 33) % (stop - start)), 4);
            result = (result ^ word) * FACTOR;
            result ^= result >> 29;
        }
    }
    return result;
}

}  // namespace clearhead

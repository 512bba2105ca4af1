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

void run_affine(const Kernels& kernels, const Affine& a) {
    if (a.rows == 0 || a.outer == 0) return;
    // Rows that stay in the second cache, and columns whose weights stay there with them.
    constexpr int64_t ROWS = 64, COLUMNS = 64;
    const int64_t chunks = divide_up(a.outer, COLUMNS), bytes = a.type == Type::float32 ? 4 : 2;
    const auto run = [&](int64_t index, float* scratch) {
        const int64_t row = index / chunks * ROWS, column = index % chunks * COLUMNS;
        Affine block = a;
        block.rows = smaller(ROWS, a.rows - row);
        block.x = static_cast<const char*>(a.x) + row * a.inner * bytes;
        block.y = static_cast<char*>(a.y) + row * a.outer * bytes;
        kernels.affine_columns[a.type](block, column, smaller(a.outer, column + COLUMNS), scratch);
    };
    parallel_for(divide_up(a.rows, ROWS) * chunks, a.threads, ROWS * COLUMNS, run);
}

void run_transposition(const Kernels& kernels, const Transposition& t) {
    constexpr int64_t COLUMNS = 64;
    parallel_for(divide_up(t.columns, COLUMNS), t.threads, 16, [&](int64_t strip, float*) {
        kernels.transpose_columns(t, strip * COLUMNS, smaller(t.columns, (strip + 1) * COLUMNS));
    });
}

uint64_t digest(const int64_t* addresses, int64_t count) {
    uint64_t result = 0;
    for (int64_t n = 0; n < count; n++) {
        uint32_t word;
        memcpy(&word, reinterpret_cast<const char*>(addresses[n]), 4);
        result = (result ^ word) * 0x9e3779b97f4a7c15u;  // odd, so that no bit is lost
        result ^= result >> 29;
    }
    return result;
}

}  // namespace clearhead

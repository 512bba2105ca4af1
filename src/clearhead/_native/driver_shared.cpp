#include "driver_shared.h"

#include <atomic>
#include <initializer_list>

namespace clearhead {
namespace {

constexpr int64_t FEW_ROWS = 12;          // beyond these tiles take less time,
constexpr int64_t FEW_ROWS_OF_PAIRS = 5;  // or beyond these if they multiply pairs of bfloat16,
constexpr int64_t FEW_ROWS_AND_KEYS = 4;  // or beyond these with at most
constexpr int64_t FEW_KEYS = 16;

// Whether the bits of any number, without its sign, are above a limit. Above infinity there is only NaN.
template <class Bits>
bool any_above(const char* row, int64_t count, Bits limit) {
    constexpr Bits UNSIGNED = static_cast<Bits>(~Bits()) >> 1;
    Bits any = 0;
    for (int64_t j = 0; j < count; j++) {
        Bits bits;
        memcpy(&bits, row + j * static_cast<int64_t>(sizeof bits), sizeof bits);
        any = static_cast<Bits>(any | ((bits & UNSIGNED) > limit));
    }
    return any;
}

}  // namespace

Problem part_of(const Problem& all, int64_t batch, int64_t head, int64_t kv_head, int64_t row, int64_t key) {
    Problem p = all;
    const auto move = [&](View& view, int64_t of_head, int64_t start, int64_t column, int64_t bytes) {
        if (view.data) view.data = view.address(batch, of_head, start, bytes) + column * view.column * bytes;
    };
    for (View* view : {&p.query, &p.output_gradient, &p.query_gradient}) move(*view, head, row, 0, p.bytes());
    for (View* view : {&p.key, &p.value, &p.key_gradient, &p.value_gradient}) move(*view, kv_head, key, 0, p.bytes());
    move(p.output, head, row, 0, p.wide_output ? 4 : p.bytes()), move(p.exact_output, head, row, 0, 4);
    move(p.visible, head, row, key, 1), move(p.bias, head, row, key, 4);
    const int64_t place = p.row_place(batch, head, row);
    if (p.lse) p.lse += place;
    if (p.lse_gradient) p.lse_gradient += place;
    if (p.correction) p.correction += place;
    return p;
}

bool decodes(const Kernels& kernels, const Problem& p) {
    const int64_t of_many_keys = kernels.pairs && p.type == bfloat16 ? FEW_ROWS_OF_PAIRS : FEW_ROWS;
    return !p.drop_below && p.folded_rows() <= (p.keys <= FEW_KEYS ? FEW_ROWS_AND_KEYS : of_many_keys);
}

bool has_nan(const Problem& p, const View& view, int64_t heads, int64_t rows, int64_t columns, int64_t bytes) {
    const int64_t units = p.batch * heads;
    std::atomic<bool> any_nan(false);
    parallel_for(units, p.threads, 16, [&](int64_t unit, float*) {
        bool any = false;
        for (int64_t i = 0; i < rows && !any; i++) {
            const char* row = view.address(unit / heads, unit % heads, i, bytes);
            if (bytes == 4)
                any = any_above<uint32_t>(row, columns, 0x7f800000);
            else
                any = any_above<uint16_t>(row, columns, p.type == Type::bfloat16 ? 0x7f80 : 0x7c00);
        }
        if (any) any_nan = true;
    });
    return any_nan;
}

}  // namespace clearhead

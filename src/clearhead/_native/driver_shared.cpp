#include "driver_shared.h"

#include <atomic>

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
            const int64_t place = unit / heads * view.batch + unit % heads * view.head + i * view.row;
            const char* row = static_cast<const char*>(view.data) + place * bytes;
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

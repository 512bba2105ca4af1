// Vectors of LANES floats, with compiler vector types, and their functions.
// Included once for each instruction set, inside its namespace: no inline function may be shared between two of them.
#pragma once
#include "isa.h"

namespace clearhead::ISA {

// Before a loop with a constant number of steps.
#define UNROLL _Pragma("GCC unroll 16")

using clearhead::larger;  // beside that of vectors

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint64_t Longs __attribute__((vector_size(LANES * 4)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef float HalfFloats __attribute__((vector_size(LANES * 2), aligned(4)));
typedef float LooseFloats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t LooseInts __attribute__((vector_size(LANES * 4), aligned(4)));

constexpr double LOG2_OF_E = 1.4426950408889634074, LN_OF_2 = 0.69314718055994530942;
constexpr float LOG2E = static_cast<float>(LOG2_OF_E);
constexpr float LOWEST = -3.402823466e38f;

INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Ints splat(int32_t x) { return x - Ints{}; }
INLINE Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
INLINE Ints load(const int32_t* from) { return *reinterpret_cast<const LooseInts*>(from); }
INLINE void store(int32_t* to, Ints x) { *reinterpret_cast<LooseInts*>(to) = x; }
INLINE void store(float* to, Floats x) { *reinterpret_cast<LooseFloats*>(to) = x; }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The same number, which a compiler does not fuse with the addition that follows: forward and backward pass have to round
// a score alike, or their weights differ by the score's rounding.
INLINE Floats rounded(Floats x) {
#if LANES == 16
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// 2^round(x) for -127 <= x <= 127 (zero at -127), and f = x − round(x).
INLINE Floats whole_power(Floats x, Floats& f) {
    const Floats magic = splat(12582912.f + 127.f);  // adding it leaves round(x) + 127 in the lowest bits
    const Floats shifted = x + magic;
    f = x - (shifted - magic);
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(shifted) << 23);
}

// 2^x to 2e-7 for -127 <= x <= 127, zero below -126.5, NaN for NaN. A minimax polynomial of 2^f on [−½, ½].
INLINE Floats exp2_within(Floats x) {
    Floats f;
    const Floats power = whole_power(x, f);
    Floats y = f * 0.00132647273f + 0.00967151299f;
    y = y * f + 0.0555073358f;
    y = y * f + 0.240222424f;
    y = y * f + 0.693147004f;
    y = y * f + 1.f;
    return y * power;
}

// The same for x <= 127, zero below -126 (and for −∞).
INLINE Floats exp2(Floats x) { return x < splat(-126.f) ? Floats{} : exp2_within(x); }

// tanh to 2e-7: an odd polynomial near zero (Cephes, tanhf.c), 1 − 2/(e^{2|x|} + 1) beyond.
INLINE Floats tanh(Floats x) {
    const Floats size = x < Floats{} ? -x : x;
    const Floats decay = exp2(size * (-2.f * LOG2E));
    const Floats far = (1.f - decay) / (1.f + decay);
    const Floats z = x * x;
    Floats y = z * -5.70498872745e-3f + 2.06390887954e-2f;
    y = y * z - 5.37397155531e-2f;
    y = y * z + 1.33314422036e-1f;
    y = y * z - 3.33332819422e-1f;
    const Floats near = y * z * x + x;
    return size < splat(0.625f) ? near : (x < Floats{} ? -far : far);
}

// Which lanes of a comparison are true, one bit for each. (gcc 12 defines no __AVX512F__ after `#pragma GCC target`.)
INLINE uint32_t bits(Ints x) {
#if LANES == 16
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(x));
#elif LANES == 8
    return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x)));
#elif defined(__aarch64__)
    return vaddvq_u32(reinterpret_cast<uint32x4_t>(x & Ints{1, 2, 4, 8}));
#else
    uint32_t result = 0;
    for (int lane = 0; lane < LANES; lane++) result |= (x[lane] & 1u) << lane;
    return result;
#endif
}

template <int... I>
using Numbers = std::integer_sequence<int, I...>;
typedef std::make_integer_sequence<int, LANES> Lanes;

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Exchanges blocks of STRIDE lanes between rows i and i + STRIDE.
template <int STRIDE, int... I>
INLINE void exchange(Floats (&x)[LANES], Numbers<I...>) {
    UNROLL for (int i = 0; i < LANES; i++) {
        if (i & STRIDE) continue;
        const Floats a = x[i], b = x[i + STRIDE];
        x[i] = SHUFFLE(a, b, (I & STRIDE ? LANES + I - STRIDE : I)...);
        x[i + STRIDE] = SHUFFLE(a, b, (I & STRIDE ? LANES + I : I + STRIDE)...);
    }
}

// Transposes a square of LANES × LANES, from blocks of STRIDE lanes on.
template <int STRIDE = 1>
INLINE void transpose(Floats (&x)[LANES]) {
    exchange<STRIDE>(x, Lanes());
    if constexpr (2 * STRIDE < LANES) transpose<2 * STRIDE>(x);
}

template <int STRIDE, int... I>
INLINE Floats swapped(Floats x, Numbers<I...>) {
    return SHUFFLE(x, x, (I ^ STRIDE)...);
}

// Joins all lanes by halves.
template <Floats (*join)(Floats, Floats), int STRIDE = LANES / 2>
INLINE float reduce(Floats x) {
    x = join(x, swapped<STRIDE>(x, Lanes()));
    if constexpr (STRIDE > 1) return reduce<join, STRIDE / 2>(x);
    else return x[0];
}

INLINE Floats both(Floats a, Floats b) { return a + b; }
INLINE float sum(Floats x) { return reduce<both>(x); }
INLINE float largest_lane(Floats x) { return reduce<larger>(x); }

// Sums of lanes that lie STRIDE apart: of a's where that bit of a lane's number is 0, of b's where it is 1.
template <int STRIDE, int... I>
INLINE Floats add_across(Floats a, Floats b, Numbers<I...>) {
    return SHUFFLE(a, b, (I & STRIDE ? LANES + I - STRIDE : I)...) +
           SHUFFLE(a, b, (I & STRIDE ? LANES + I : I + STRIDE)...);
}

// Joins N vectors, each of which `join_sums<1, FROM>` has left.
template <int FROM, int N>
INLINE Floats join_sums(const Floats* x) {
    if constexpr (N == 1) return x[0];
    else {
        constexpr int HALF = N / 2;
        return add_across<FROM * HALF>(join_sums<FROM, HALF>(x), join_sums<FROM, HALF>(x + HALF), Lanes());
    }
}

// The sum of each of LANES vectors, in the lane of its number. Like `transpose`, but every step leaves half as many.
INLINE Floats sums(const Floats (&x)[LANES]) { return join_sums<1, LANES>(x); }

}  // namespace clearhead::ISA

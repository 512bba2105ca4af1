// Vectors of LANES floats, written with compiler vector types, and the few functions of them attention needs.
// Included once for each instruction set, inside its namespace: no inline function may be shared between two of them.
#pragma once
#include "isa.h"

namespace clearhead::ISA {

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint64_t Longs __attribute__((vector_size(LANES * 4)));
typedef float LooseFloats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t LooseInts __attribute__((vector_size(LANES * 4), aligned(4)));

struct BFloat16 {
    uint16_t bits;
};
#ifdef __FLT16_MANT_DIG__
typedef _Float16 Float16;
#else
struct Float16 {  // of compilers that have none of their own
    uint16_t bits;
};
#endif

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

INLINE float widen(float x) { return x; }
INLINE float widen(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(float x, BFloat16* to) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#ifdef __FLT16_MANT_DIG__
INLINE float widen(Float16 x) { return static_cast<float>(x); }
INLINE void narrow(float x, Float16* to) { *to = static_cast<Float16>(x); }
#else
INLINE float with_bits(uint32_t bits) {
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
INLINE float widen(Float16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
    if (rest >= 0x0f800000) return with_bits(sign | 0x7f800000 | rest);  // infinity and NaN
    const float size = with_bits(rest) * 0x1p112f;  // the exponents' biases differ by 112, also below the normal numbers
    return sign ? -size : size;
}
INLINE void narrow(float x, Float16* to) {
    const float size = fabsf(x);
    uint32_t bits, sign;
    memcpy(&sign, &x, 4);
    if (!(size < 65520.f)) {
        bits = size != size ? 0x7e00 : 0x7c00;
    } else if (size < 0x1p-14f) {
        const float shifted = size + 0.5f;  // whose last bit is worth 2^−24, as those below the normal numbers are
        memcpy(&bits, &shifted, 4);
        bits -= 0x3f000000;
    } else {
        memcpy(&bits, &size, 4);
        bits = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;  // to the nearest, ties to even
    }
    to->bits = static_cast<uint16_t>(bits | (sign >> 16 & 0x8000));
}
#endif

INLINE Floats load_wide(const float* from) { return load(from); }
INLINE void store_narrow(float* to, Floats x) { store(to, x); }

// Numbers of sixteen bits. (gcc 12 splits conversions of vectors in two, and those of _Float16 into single numbers.)
#if LANES == 16
INLINE __m256i load_halves(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
INLINE Words load_words(const void* from) { return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(load_halves(from))); }
INLINE Floats load_wide(const Float16* from) { return _mm512_cvtph_ps(load_halves(from)); }
INLINE void store_narrow(Float16* to, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif LANES == 8
INLINE __m128i load_halves(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
INLINE Words load_words(const void* from) { return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(load_halves(from))); }
INLINE Floats load_wide(const Float16* from) { return _mm256_cvtph_ps(load_halves(from)); }
INLINE void store_narrow(Float16* to, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
INLINE Words load_words(const void* from) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));
    return __builtin_convertvector(*static_cast<const Halves*>(from), Words);
}
INLINE Floats load_wide(const Float16* from) {
    Floats result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = widen(from[lane]);
    return result;
}
INLINE void store_narrow(Float16* to, Floats x) {
    for (int lane = 0; lane < LANES; lane++) narrow(x[lane], to + lane);
}
#endif
INLINE Floats load_wide(const BFloat16* from) { return reinterpret_cast<Floats>(load_words(from) << 16); }
INLINE void store_narrow(BFloat16* to, Floats x) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));
    const Words bits = reinterpret_cast<Words>(x);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words result = x == x ? rounded : rounded * 0 + 0x7fc0;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(result, Halves);
}

// The first `count` lanes; the others are zero and nothing beyond them is read.
template <class T>
INLINE Floats load_some(const T* from, int64_t count) {
    if (count >= LANES) return load_wide(from);
    Floats result = {};
    for (int64_t lane = 0; lane < count; lane++) result[lane] = widen(from[lane]);
    return result;
}

template <class T>
INLINE void store_some(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store_narrow(to, x);
    for (int64_t lane = 0; lane < count; lane++) narrow(x[lane], to + lane);
}

#if LANES == 16
INLINE Floats load_some(const float* from, int64_t count) {
    return count >= LANES ? load(from) : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << count) - 1), from);
}
INLINE void store_some(float* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1 << count) - 1), x);
}
#endif

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
#else
    uint32_t result = 0;
    for (int lane = 0; lane < LANES; lane++) result |= (x[lane] & 1u) << lane;
    return result;
#endif
}

template <int... I>
struct Numbers {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    typedef Numbers<I...> Type;
};

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Exchanges blocks of STRIDE lanes between rows i and i + STRIDE.
template <int STRIDE, int... I>
INLINE void exchange(Floats (&x)[LANES], Numbers<I...>) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & STRIDE) continue;
        const Floats a = x[i], b = x[i + STRIDE];
        x[i] = SHUFFLE(a, b, (I & STRIDE ? LANES + I - STRIDE : I)...);
        x[i + STRIDE] = SHUFFLE(a, b, (I & STRIDE ? LANES + I : I + STRIDE)...);
    }
}

// Transposes a square of LANES × LANES.
INLINE void transpose(Floats (&x)[LANES]) {
    const Count<LANES>::Type lanes;
    exchange<1>(x, lanes);
    exchange<2>(x, lanes);
#if LANES > 4
    exchange<4>(x, lanes);
#endif
#if LANES > 8
    exchange<8>(x, lanes);
#endif
}

template <int STRIDE, int... I>
INLINE Floats swapped(Floats x, Numbers<I...>) {
    return SHUFFLE(x, x, (I ^ STRIDE)...);
}

// Joins all lanes by halves.
template <Floats (*join)(Floats, Floats)>
INLINE float reduce(Floats x) {
    const Count<LANES>::Type lanes;
    x = join(x, swapped<LANES / 2>(x, lanes));
    x = join(x, swapped<LANES / 4>(x, lanes));
#if LANES > 4
    x = join(x, swapped<LANES / 8>(x, lanes));
#endif
#if LANES > 8
    x = join(x, swapped<LANES / 16>(x, lanes));
#endif
    return x[0];
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
        const typename Count<LANES>::Type lanes;
        return add_across<FROM * HALF>(join_sums<FROM, HALF>(x), join_sums<FROM, HALF>(x + HALF), lanes);
    }
}

// The sum of each of LANES vectors, in the lane of its number. Like `transpose`, but every step leaves half as many.
INLINE Floats sums(const Floats (&x)[LANES]) { return join_sums<1, LANES>(x); }

INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011), one counter in each lane.
INLINE Longs multiply_even(Longs x, uint32_t factor) {
#if LANES == 16
    return reinterpret_cast<Longs>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), _mm512_set1_epi32(factor)));
#elif LANES == 8
    return reinterpret_cast<Longs>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x), _mm256_set1_epi32(factor)));
#else
    return (x & 0xffffffffu) * factor;
#endif
}

INLINE void multiply_wide(Words x, uint32_t factor, Words& low, Words& high) {
    const Longs even = multiply_even(reinterpret_cast<Longs>(x), factor);
    const Longs odd = multiply_even(reinterpret_cast<Longs>(x) >> 32, factor);
    low = reinterpret_cast<Words>((even & 0xffffffffu) | (odd << 32));
    high = reinterpret_cast<Words>((even >> 32) | (odd & 0xffffffff00000000u));
}

INLINE void philox(Words (&counter)[4], uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        Words low0, high0, low1, high1;
        multiply_wide(counter[0], 0xD2511F53u, low0, high0);
        multiply_wide(counter[2], 0xCD9E8D57u, low1, high1);
        counter[0] = high1 ^ counter[1] ^ key0;
        counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ key1;
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

}  // namespace clearhead::ISA

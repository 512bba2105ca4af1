// Numbers of sixteen bits and of 32: one by one, as whole vectors, and as the first lanes of one.
#pragma once
#include "vector.h"

namespace clearhead::ISA {

struct BFloat16 {
    uint16_t bits;
};
#if defined(__aarch64__)  // every compiler of Arm has this type; gcc has _Float16 in C++ from version 13 on, its macro before
#define HAS_FLOAT16
typedef __fp16 Float16;
#elif defined(__FLT16_MANT_DIG__)
#define HAS_FLOAT16
typedef _Float16 Float16;
#else
struct Float16 {  // of compilers that have none of their own
    uint16_t bits;
};
#endif

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
#ifdef HAS_FLOAT16
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

}  // namespace clearhead::ISA

// Numbers of sixteen bits and of 32, as whole vectors and as the first lanes of one.
#pragma once
#include "vector.h"

namespace clearhead::ISA {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));

INLINE Floats load_wide(const float* from) { return load(from); }
INLINE void store_narrow(float* to, Floats x) { store(to, x); }

// (gcc 12 splits conversions of vectors in two.)
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
    return __builtin_convertvector(*static_cast<const Halves*>(from), Words);
}
#ifdef __aarch64__
INLINE Floats load_wide(const Float16* from) {
    return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
}
INLINE void store_narrow(Float16* to, Floats x) {
    vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(x))));
}
#else
INLINE Floats load_wide(const Float16* from) {
    const Words bits = load_words(from), sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    // The exponents' biases differ by 112, also below the normal numbers. The largest exponent is infinity or NaN.
    const Words finite = reinterpret_cast<Words>(reinterpret_cast<Floats>(rest) * 0x1p112f);
    return reinterpret_cast<Floats>(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : finite));
}
INLINE void store_narrow(Float16* to, Floats x) {
    const Words bits = reinterpret_cast<Words>(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    // To the nearest, ties to even. Below 2^−14 the last bit of |x| + ½ is worth 2^−24, as in float16.
    const Words small = reinterpret_cast<Words>(reinterpret_cast<Floats>(rest) + 0.5f) - 0x3f000000u;
    const Words normal = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
    const Words finite = rest < 0x38800000u ? small : normal;
    const Words not_finite = rest > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
    const Words result = rest >= 0x477ff000u ? not_finite : finite;  // from 65520 on
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(sign | result, Halves);
}
#endif
#endif
INLINE Floats load_wide(const BFloat16* from) { return reinterpret_cast<Floats>(load_words(from) << 16); }
INLINE void store_narrow(BFloat16* to, Floats x) {
    const Words bits = reinterpret_cast<Words>(x);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words result = x == x ? rounded : rounded * 0 + 0x7fc0;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(result, Halves);
}

// The first `count` lanes; the others are zero and nothing beyond them is read.
template <class T>
INLINE Floats load_some(const T* from, int64_t count) {
    if (count >= LANES) return load_wide(from);
#if LANES == 16
    const __m256i some = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << count) - 1), from);
    return load_wide(reinterpret_cast<const T*>(&some));
#else
    T some[LANES] = {};
    for (int64_t lane = 0; lane < count; lane++) some[lane] = from[lane];
    return load_wide(some);
#endif
}

template <class T>
INLINE void store_some(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store_narrow(to, x);
    T some[LANES];
    store_narrow(some, x);
    for (int64_t lane = 0; lane < count; lane++) to[lane] = some[lane];
}

#if LANES == 16
INLINE Floats load_some(const float* from, int64_t count) {
    return count >= LANES ? load(from) : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << count) - 1), from);
}
INLINE void store_some(float* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1 << count) - 1), x);
}
#else
INLINE void store_some(float* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    for (int64_t lane = 0; lane < count; lane++) to[lane] = x[lane];
}
#endif

}  // namespace clearhead::ISA

// The random numbers of dropout.
#pragma once
#include "vector.h"

namespace clearhead::ISA {

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011), one counter in each lane.
INLINE Longs multiply_even(Longs x, uint32_t factor) {
#if LANES == 16
    return reinterpret_cast<Longs>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), _mm512_set1_epi32(factor)));
#elif LANES == 8
    return reinterpret_cast<Longs>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x), _mm256_set1_epi32(factor)));
#elif defined(__aarch64__)
    return reinterpret_cast<Longs>(vmull_n_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(x)), factor));
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

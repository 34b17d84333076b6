// 16-bit floats to float32 and back, and the rounding of 16-bit states.
//
// Part of kernels.h: compiled once per instruction set, in an anonymous namespace.

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline bool is_nan(std::uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

inline float from_bfloat16(std::uint16_t half) {
    return float_of(static_cast<std::uint32_t>(half) << 16);
}

// Adds `carry` below the kept bits and cuts them off. A NaN is kept apart: the carry could make it
// an infinity.
inline std::uint16_t cut_to_bfloat16(std::uint32_t bits, std::uint32_t carry) {
    const std::uint32_t rounded = (bits + carry) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return static_cast<std::uint16_t>(is_nan(bits) ? quiet_nan : rounded);
}

// To the nearest, ties to even.
inline std::uint16_t to_bfloat16(float value) {
    const std::uint32_t bits = bits_of(value);
    return cut_to_bfloat16(bits, 0x7fffu + ((bits >> 16) & 1u));
}

// Up or down with the probabilities that make the expected value exact, so that updates smaller
// than half a spacing are not lost. The random number is a hash of (seed, index): the result does
// not depend on threads or blocks. The mixer is the finalizer of MurmurHash3.
inline std::uint16_t to_bfloat16_stochastic(float value, std::uint32_t seed, std::uint32_t index) {
    std::uint32_t hash = index * 0x9e3779b9u + seed;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    return cut_to_bfloat16(bits_of(value), hash >> 16);
}

// In integers: a subnormal float32 on the way would be lost in a thread that flushes them to zero.
inline float from_float16(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    const std::uint32_t rebias =
        magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;  // infinity and NaN, or a number
    const std::uint32_t normal = (magnitude << 13) + rebias;
    const std::uint32_t subnormal =
        bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    return float_of(sign | (magnitude < 0x400u ? subnormal : normal));
}

// To the nearest, ties to even; beyond the range to infinity.
inline std::uint16_t to_float16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal =
        (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // float32 has at 0.5 the spacing of float16's subnormals: adding 0.5 rounds to it.
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x47800000u ? 0x7c00u : half;
    half = is_nan(magnitude) ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : half;
    return static_cast<std::uint16_t>(sign | half);
}

inline void load_bfloat16(const std::uint16_t* __restrict source, float* __restrict target,
                          int count) {
    for (int i = 0; i < count; ++i) target[i] = from_bfloat16(source[i]);
}

inline void store_bfloat16(const float* __restrict source, std::uint16_t* __restrict target,
                           int count) {
    int i = 0;
#if ROUNDPIPE_F16C
    // What compilers make of the loop below takes so long that the memory waits for it.
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i below_half = _mm256_set1_epi32(0x7fff);
    const __m256i quiet = _mm256_set1_epi32(0x400000);
    for (; i + 16 <= count; i += 16) {
        __m256i kept[2];
        for (int k = 0; k < 2; ++k) {
            const __m256 values = _mm256_loadu_ps(source + i + 8 * k);
            const __m256i bits = _mm256_castps_si256(values);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
            const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, below_half), odd);
            const __m256 nan = _mm256_castsi256_ps(_mm256_or_si256(bits, quiet));
            const __m256 either = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan,
                                                   _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
            kept[k] = _mm256_srli_epi32(_mm256_castps_si256(either), 16);
        }
        const __m256i packed = _mm256_packus_epi32(kept[0], kept[1]);  // within halves of 128 bits
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i),
                            _mm256_permute4x64_epi64(packed, 0xd8));
    }
#endif
    for (; i < count; ++i) target[i] = to_bfloat16(source[i]);
}

inline void store_bfloat16_stochastic(const float* __restrict source,
                                      std::uint16_t* __restrict target, int count,
                                      std::uint32_t seed, std::uint32_t first_index) {
    for (int i = 0; i < count; ++i)
        target[i] =
            to_bfloat16_stochastic(source[i], seed, first_index + static_cast<std::uint32_t>(i));
}

// Compilers do not vectorise with the float16 instructions by themselves.
inline void load_float16(const std::uint16_t* __restrict source, float* __restrict target,
                         int count) {
    int i = 0;
#if ROUNDPIPE_F16C
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(
            target + i,
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
#endif
    for (; i < count; ++i) target[i] = from_float16(source[i]);
}

inline void store_float16(const float* __restrict source, std::uint16_t* __restrict target,
                          int count) {
    int i = 0;
#if ROUNDPIPE_F16C
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; ++i) target[i] = to_float16(source[i]);
}

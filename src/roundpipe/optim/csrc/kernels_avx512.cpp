// Kernels for x86-64 with AVX-512 (F, BW, DQ, VL).
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>

// After the standard headers: what they define inline may be shared with other units and must stay
// baseline.
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#define ROUNDPIPE_FIND_KERNEL find_kernel_avx512
#define ROUNDPIPE_FMA 1
#define ROUNDPIPE_F16C 1
#define ROUNDPIPE_STREAM 1
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
namespace roundpipe {
Kernel find_kernel_avx512(std::int32_t, std::int32_t) {
    return nullptr;
}
}  // namespace roundpipe
#endif

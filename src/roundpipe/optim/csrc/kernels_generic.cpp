// Kernels for the compiler's own target: baseline x86-64, aarch64 with NEON, anything else.
#include <cmath>
#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#define ROUNDPIPE_STREAM 1
#endif
#include "abi.h"

#define ROUNDPIPE_FIND_KERNEL find_kernel_generic
#if defined(__FMA__) || defined(__aarch64__)
#define ROUNDPIPE_FMA 1
#endif
#include "kernels.h"

// The elementwise loop around a functor, and the table of kernels.
//
// Included by one translation unit per instruction set, each of which has set the compiler's target
// and the macros ROUNDPIPE_FIND_KERNEL, ROUNDPIPE_FMA, ROUNDPIPE_F16C and ROUNDPIPE_STREAM. All
// code is in an anonymous namespace: if two units shared a symbol, the linker could keep the copy
// with instructions that the machine lacks.
//
// One pass over memory. A block of gradients (and of 16-bit states) becomes float32 in a buffer
// that stays in the first cache, the functor runs over plain float arrays, which compilers
// vectorise, and the new parameters leave rounded.

namespace roundpipe {
namespace {

#include "convert.h"
#include "functors.h"

constexpr int kBlock = 64;  // elements; small, so that the memory streams are read evenly
constexpr std::int64_t kStreamMin =
    1 << 18;  // elements; less than that may soon be wanted from the cache

struct alignas(64) Buffers {
    float grad[kBlock];
    float param[kBlock];
    float states[kMaxStates][kBlock];
    std::uint16_t published[kBlock];
};

// One block of one task: where it begins, and how much of it there is.
struct Block {
    std::int64_t start;
    int count;
    bool whole() const { return count == kBlock; }
};

// The hardware's prefetchers stop at each page; a write is announced, so that the line comes once.
template <int kWrite>
inline void prefetch(const void* address, int bytes) {
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch(static_cast<const char*>(address) + i, kWrite);
}

inline void copy_floats(float* target, const float* source, int count) {
    __builtin_memcpy(target, source, static_cast<std::size_t>(count) * sizeof(float));
}

// The stages around the functor do not depend on it: kept out of line, they are compiled once, not
// once per optimizer.
#define ROUNDPIPE_STAGE __attribute__((noinline))

// The gradient as float32, scaled, with L2 decay. If nothing is to be done it is used where it
// lies.
ROUNDPIPE_STAGE const float* load_gradient(const Task& task, Block block, const float* param,
                                           float* buffer) {
    const float* grad = buffer;
    if (task.grad_dtype == kFloat32) {
        grad = static_cast<const float*>(task.grad) + block.start;
        prefetch<0>(grad + kBlock, kBlock * 4);
        if (!block.whole()) {
            copy_floats(buffer, grad, block.count);
            grad = buffer;
        }
    } else {
        const std::uint16_t* half = static_cast<const std::uint16_t*>(task.grad) + block.start;
        prefetch<0>(half + kBlock, kBlock * 2);
        if (task.grad_dtype == kBFloat16)
            load_bfloat16(half, buffer, block.count);
        else
            load_float16(half, buffer, block.count);
    }
    if (task.grad_scale != 1) {
        const float scale = static_cast<float>(task.grad_scale);
        for (int i = 0; i < kBlock; ++i) buffer[i] = grad[i] * scale;
        grad = buffer;
    }
    if (task.coupled_decay != 0) {
        const float decay = static_cast<float>(task.coupled_decay);
        for (int i = 0; i < kBlock; ++i) buffer[i] = multiply_add(param[i], decay, grad[i]);
        grad = buffer;
    }
    return grad;
}

// A float32 array that is updated where it lies, unless the block is the last, short one.
inline float* load_floats(float* values, Block block, float* buffer) {
    prefetch<1>(values + block.start + kBlock, kBlock * 4);
    if (block.whole()) return values + block.start;
    copy_floats(buffer, values + block.start, block.count);
    return buffer;
}

ROUNDPIPE_STAGE float* load_state(const Task& task, int index, Block block, float* buffer) {
    if (task.state_dtype == kFloat32)
        return load_floats(static_cast<float*>(task.states[index]), block, buffer);
    const std::uint16_t* half = static_cast<const std::uint16_t*>(task.states[index]) + block.start;
    prefetch<1>(half + kBlock, kBlock * 2);
    load_bfloat16(half, buffer, block.count);
    return buffer;
}

ROUNDPIPE_STAGE void store_state(const Task& task, int index, Block block, const float* values) {
    if (task.state_dtype == kFloat32) {
        if (!block.whole())
            copy_floats(static_cast<float*>(task.states[index]) + block.start, values, block.count);
        return;
    }
    const std::uint64_t mixed =
        (task.seed + static_cast<std::uint64_t>(block.start >> 32)) * 0x9e3779b97f4a7c15u;
    const std::uint32_t seed =
        static_cast<std::uint32_t>(mixed >> 32) + 0x632be5abu * static_cast<std::uint32_t>(index);
    store_bfloat16_stochastic(values, static_cast<std::uint16_t*>(task.states[index]) + block.start,
                              block.count, seed, static_cast<std::uint32_t>(block.start));
}

// Past the caches where that is possible: a line that is only written need not be read first.
inline void copy_past_cache(void* target, const void* source, int bytes) {
#if ROUNDPIPE_STREAM
    if (reinterpret_cast<std::uintptr_t>(target) % 16 == 0 && bytes % 16 == 0) {
        for (int i = 0; i < bytes; i += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(target) + i),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(
                                 static_cast<const char*>(source) + i)));
        return;
    }
#endif
    __builtin_memcpy(target, source, static_cast<std::size_t>(bytes));
}

ROUNDPIPE_STAGE void publish(const Task& task, Block block, const float* param,
                             std::uint16_t* buffer) {
    const bool stream = task.numel >= kStreamMin;
    if (task.published_dtype == kFloat32) {
        float* target = static_cast<float*>(task.published) + block.start;
        if (stream)
            copy_past_cache(target, param, block.count * 4);
        else
            copy_floats(target, param, block.count);
        return;
    }
    std::uint16_t* target = static_cast<std::uint16_t*>(task.published) + block.start;
    std::uint16_t* rounded = stream ? buffer : target;
    if (task.published_dtype == kBFloat16)
        store_bfloat16(param, rounded, block.count);
    else
        store_float16(param, rounded, block.count);
    if (stream) copy_past_cache(target, buffer, block.count * 2);
}

// Out of line as well: inlined, the compiler would forget that the arrays do not overlap.
template <class Functor>
ROUNDPIPE_STAGE void update(Functor functor, const float* __restrict grad, float* __restrict param,
                            float* __restrict a, float* __restrict b, float* __restrict c) {
    for (int i = 0; i < kBlock; ++i) {
        float unused = 0.0f;
        if constexpr (Functor::kStates == 0) functor(grad[i], param[i], unused, unused, unused);
        if constexpr (Functor::kStates == 1) functor(grad[i], param[i], a[i], unused, unused);
        if constexpr (Functor::kStates == 2) functor(grad[i], param[i], a[i], b[i], unused);
        if constexpr (Functor::kStates == 3) functor(grad[i], param[i], a[i], b[i], c[i]);
    }
}

template <class Functor>
void run(const Task& task, std::int64_t begin, std::int64_t end) {
    const Functor functor(task.scalars);
    Buffers buffers{};  // zeros: a short block's unused rest is computed with too
    for (std::int64_t start = begin; start < end; start += kBlock) {
        const Block block{start, static_cast<int>(end - start < kBlock ? end - start : kBlock)};
        float* param = load_floats(task.param, block, buffers.param);
        const float* grad = load_gradient(task, block, param, buffers.grad);
        float* states[kMaxStates] = {};
        for (int k = 0; k < Functor::kStates; ++k)
            states[k] = load_state(task, k, block, buffers.states[k]);
        update(functor, grad, param, states[0], states[1], states[2]);
        for (int k = 0; k < Functor::kStates; ++k) store_state(task, k, block, states[k]);
        if (!block.whole()) copy_floats(task.param + start, param, block.count);
        if (task.published) publish(task, block, param, buffers.published);
    }
#if ROUNDPIPE_STREAM
    _mm_sfence();  // streamed stores are not ordered by the join that ends the step
#endif
}

inline Kernel find(std::int32_t algorithm, std::int32_t variant) {
    const Kernel adam[] = {run<Adam<false>>, run<Adam<true>>};
    const Kernel sgd[] = {run<Sgd<false, false>>, run<Sgd<true, false>>, run<Sgd<true, true>>};
    const Kernel rmsprop[] = {run<Rmsprop<false, false>>, run<Rmsprop<true, false>>,
                              run<Rmsprop<false, true>>, run<Rmsprop<true, true>>};
    switch (algorithm) {
        case kAdam:
            return variant < 2 ? adam[variant] : nullptr;
        case kSgd:
            return variant < 3 ? sgd[variant] : nullptr;
        case kRmsprop:
            return variant < 4 ? rmsprop[variant] : nullptr;
        default:
            break;
    }
    if (variant != 0) return nullptr;
    switch (algorithm) {
        case kAdagrad:
            return run<Adagrad>;
        case kAdamax:
            return run<Adamax>;
        case kNadam:
            return run<Nadam>;
        case kRadam:
            return run<Radam>;
        case kAdadelta:
            return run<Adadelta>;
        case kAsgd:
            return run<Asgd>;
        case kRprop:
            return run<Rprop>;
        case kLion:
            return run<Lion>;
        default:
            return nullptr;
    }
}

}  // namespace

Kernel ROUNDPIPE_FIND_KERNEL(std::int32_t algorithm, std::int32_t variant) {
    return find(algorithm, variant);
}

}  // namespace roundpipe

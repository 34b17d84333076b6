// The plain C interface between Python (ctypes) and the kernels.
#pragma once

#include <cstdint>

namespace roundpipe {

enum Isa : std::int32_t { kGeneric = 0, kAvx2 = 1, kAvx512 = 2 };

enum Dtype : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

enum Algorithm : std::int32_t {
    kAdam = 0,
    kSgd = 1,
    kAdagrad = 2,
    kRmsprop = 3,
    kAdamax = 4,
    kNadam = 5,
    kRadam = 6,
    kAdadelta = 7,
    kAsgd = 8,
    kRprop = 9,
    kLion = 10,
};

constexpr int kMaxStates = 3;
constexpr int kMaxScalars = 8;

// One parameter's part of a step. Python packs arrays of these with `struct`: the field order
// matters, there is no padding, and `roundpipe_task_bytes` lets it check that both sides agree.
struct Task {
    std::int64_t numel;
    float* param;
    const void* grad;
    void* published;  // also receives the new parameter, rounded to its dtype; may be null
    void* states[kMaxStates];
    double grad_scale;            // multiplies the gradient first; negative to maximize
    double coupled_decay;         // this times the parameter is added to the gradient (L2 decay)
    double scalars[kMaxScalars];  // constants of the step; their meaning is the functor's
    std::uint64_t seed;           // of the stochastic rounding of 16-bit states
    std::int32_t grad_dtype;
    std::int32_t published_dtype;
    std::int32_t state_dtype;  // kFloat32 or kBFloat16
    std::int32_t variant;      // selects among the forms of one algorithm
};

// Updates elements [begin, end) of one task.
using Kernel = void (*)(const Task& task, std::int64_t begin, std::int64_t end);

// Null if there is no such kernel. One function per instruction set, each in its own translation
// unit.
Kernel find_kernel_generic(std::int32_t algorithm, std::int32_t variant);
Kernel find_kernel_avx2(std::int32_t algorithm, std::int32_t variant);
Kernel find_kernel_avx512(std::int32_t algorithm, std::int32_t variant);

}  // namespace roundpipe

// Entry points, the choice of the instruction set, and the threads of a step.
#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "abi.h"

#define ROUNDPIPE_API extern "C" __attribute__((visibility("default")))

namespace roundpipe {
namespace {

constexpr std::int64_t kChunk =
    1 << 15;  // elements handed to a thread at a time; a multiple of every block size
constexpr std::int64_t kChunksPerThread = 2;  // a thread costs about as much as updating one chunk

bool has(Isa isa) {
#if defined(__x86_64__)
    switch (isa) {
        case kGeneric:
            return true;
        case kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c");
        case kAvx512:
            return has(kAvx2) && __builtin_cpu_supports("avx512f") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
    }
    return false;
#else
    return isa == kGeneric;
#endif
}

Kernel find(std::int32_t isa, std::int32_t algorithm, std::int32_t variant) {
    if (variant < 0 || !has(static_cast<Isa>(isa))) return nullptr;
    switch (isa) {
        case kGeneric:
            return find_kernel_generic(algorithm, variant);
        case kAvx2:
            return find_kernel_avx2(algorithm, variant);
        case kAvx512:
            return find_kernel_avx512(algorithm, variant);
        default:
            return nullptr;
    }
}

// The tasks laid end to end and cut into chunks, which threads take in order: a thread that the
// system holds up leaves its share to the others.
class Work {
public:
    Work(const Task* tasks, const Kernel* kernels, std::int64_t count)
        : tasks_(tasks), kernels_(kernels), count_(count) {}

    void operator()() {
        std::int64_t task = 0;
        std::int64_t first_chunk = 0;  // of that task
        for (;;) {
            const std::int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
            while (task < count_ && chunk >= first_chunk + chunks_of(tasks_[task]))
                first_chunk += chunks_of(tasks_[task++]);
            if (task == count_) return;
            const std::int64_t begin = (chunk - first_chunk) * kChunk;
            kernels_[task](tasks_[task], begin, std::min(begin + kChunk, tasks_[task].numel));
        }
    }

    std::int64_t chunks() const {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < count_; ++i) total += chunks_of(tasks_[i]);
        return total;
    }

private:
    static std::int64_t chunks_of(const Task& task) { return (task.numel + kChunk - 1) / kChunk; }

    const Task* tasks_;
    const Kernel* kernels_;
    std::int64_t count_;
    std::atomic<std::int64_t> next_{0};
};

}  // namespace
}  // namespace roundpipe

using namespace roundpipe;

ROUNDPIPE_API std::int64_t roundpipe_task_bytes() {
    return sizeof(Task);
}

ROUNDPIPE_API std::int32_t roundpipe_has_isa(std::int32_t isa) {
    return has(static_cast<Isa>(isa));
}

// Runs one step over all tasks on at most `threads` threads, the calling one included. Threads
// start here and end here: they inherit the caller's CPU affinity, and nothing lives on between
// steps that a fork could break. Returns 0, or 1 if a kernel is unknown; then nothing was changed.
ROUNDPIPE_API std::int32_t roundpipe_step(std::int32_t isa, std::int32_t algorithm,
                                          const Task* tasks, std::int64_t count,
                                          std::int32_t threads) {
    std::vector<Kernel> kernels(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        kernels[static_cast<std::size_t>(i)] = find(isa, algorithm, tasks[i].variant);
        if (!kernels[static_cast<std::size_t>(i)]) return 1;
    }
    Work work(tasks, kernels.data(), count);
    const std::int64_t useful = std::min<std::int64_t>(threads, work.chunks() / kChunksPerThread);
    std::vector<std::thread> helpers;
    try {
        for (std::int64_t i = 1; i < useful; ++i) helpers.emplace_back([&work] { work(); });
    } catch (const std::system_error&) {
        // No more threads to be had: the ones there are do the work.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    return 0;
}

// Asks for large pages for memory that has not been touched yet: with 4 KiB pages, address
// translation takes up to half of the time of a step. Without effect where the system has none.
ROUNDPIPE_API void roundpipe_advise_large_pages(void* address, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t kPage = 1 << 21;
    const std::uintptr_t begin =
        (reinterpret_cast<std::uintptr_t>(address) + kPage - 1) / kPage * kPage;
    const std::uintptr_t end =
        (reinterpret_cast<std::uintptr_t>(address) + static_cast<std::uintptr_t>(bytes)) / kPage *
        kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)bytes;
#endif
}

#include "allocators.h"

#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

namespace fakeacc {

namespace {

void free_block(void* context) {
  if (context != nullptr) {
    Machine::get().free(static_cast<Block*>(context));
  }
}

c10::DataPtr allocate(int device, size_t bytes, Stream* owner, c10::Device where) {
  if (bytes == 0) {
    return {nullptr, where};
  }
  Block* block = Machine::get().allocate(device, bytes, owner);
  return {block->data, block, &free_block, where};
}

void copy_counter(const Counter& from, c10::CachingAllocator::StatArray& to) {
  auto& stat = to[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  stat = {from.current, from.peak, from.allocated, from.freed};
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    return fakeacc::allocate(device, bytes, &current_stream(device), fake_device(device));
  }

  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {
    TORCH_CHECK(false, "fakeacc memory is copied by queued tasks only");
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (int device = 0; device < Machine::get().device_count(); ++device) {
      Machine::get().empty_cache(device);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Machine::get().record_stream(data.get(), to_fake(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto stats = Machine::get().with_heap(device, [](Heap& heap) { return heap.stats; });
    c10::CachingDeviceAllocator::DeviceStats result;
    copy_counter(stats.requested_bytes, result.requested_bytes);
    copy_counter(stats.allocated_bytes, result.allocated_bytes);
    copy_counter(stats.allocated_bytes, result.active_bytes);
    copy_counter(stats.reserved_bytes, result.reserved_bytes);
    copy_counter(stats.blocks, result.allocation);
    result.num_alloc_retries = stats.retries;
    result.num_ooms = stats.out_of_memory;
    return result;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Machine::get().with_heap(device, [](Heap& heap) { heap.stats.reset_totals(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Machine::get().with_heap(device, [](Heap& heap) { heap.stats.reset_peaks(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return Machine::get().with_heap(device, [](Heap& heap) {
      const auto used = static_cast<size_t>(heap.stats.reserved_bytes.current);
      return std::pair{heap.limit_bytes - std::min(used, heap.limit_bytes), heap.limit_bytes};
    });
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return fakeacc::allocate(Heap::kHost, bytes, nullptr, at::kCPU);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // The machine itself notes which tasks use a pinned block, when they are launched.
  bool record_event(void* /*data*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }

  void empty_cache() override {
    Machine::get().empty_cache(Heap::kHost);
  }

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator device_allocator_instance;
PinnedAllocator pinned_allocator_instance;

REGISTER_ALLOCATOR(kFake, &device_allocator_instance)
REGISTER_HOST_ALLOCATOR(kFake, &pinned_allocator_instance)

} // namespace

c10::Allocator* device_allocator() {
  return &device_allocator_instance;
}

at::HostAllocator* pinned_allocator() {
  return &pinned_allocator_instance;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto data = device_allocator()->allocate(bytes);
  const auto kept = std::min(storage.nbytes(), bytes);
  if (kept > 0) {
    auto* to = data.get();
    const auto* from = storage.data();
    Launch launch{.operation = "resize"};
    launch.accesses = {
        {reinterpret_cast<uintptr_t>(from), kept, false},
        {reinterpret_cast<uintptr_t>(to), kept, true}};
    launch.run = [to, from, kept] { std::memcpy(to, from, kept); };
    Machine::get().launch(current_stream(storage.device().index()), std::move(launch));
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

} // namespace fakeacc

// The machine's memory as torch's allocators.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace fakeacc {

// Allocates on the current device of the calling thread, for its current stream.
c10::Allocator* device_allocator();
at::HostAllocator* pinned_allocator();

// Gives a storage of device memory another size, keeping the bytes that fit, in stream order.
void resize_storage(const c10::Storage& storage, size_t bytes);

} // namespace fakeacc

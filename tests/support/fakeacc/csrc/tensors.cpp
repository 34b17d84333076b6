#include "tensors.h"

#include "allocators.h"
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

namespace fakeacc {

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

at::Tensor empty_strided(
    int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const c10::DeviceGuard guard(fake_device(device));
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return view;
}

void resize_output(const at::Tensor& output, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = output.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides);
  const auto bytes = at::detail::computeStorageNbytes(
      sizes, strides, output.itemsize(), static_cast<size_t>(output.storage_offset()));
  if (bytes > output.storage().nbytes()) {
    resize_storage(output.storage(), bytes);
  }
}

Access access_of(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) {
    return {};
  }
  const auto span =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), span, write};
}

at::Tensor alias_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage memory(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), at::kCPU), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(memory), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

at::Tensor private_copy(const at::Tensor& host) {
  auto copy = at::empty(host.sizes(), host.options().pinned_memory(false));
  copy.copy_(host);
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

OnWorker::OnWorker() {
  // One intra-op thread per stream, as the test's process is set to: torch applies that setting to
  // a new thread only when it is asked to.
  thread_local const bool threads_set = [] {
    at::init_num_threads();
    return true;
  }();
  (void)threads_set;
}

} // namespace fakeacc

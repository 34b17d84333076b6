#include "shadows.h"

#include "tensors.h"

namespace fakeacc {

at::Tensor Shadows::of(const at::Tensor& tensor) {
  if (!is_fake(tensor) && (!tensor.defined() || tensor.dim() == 0)) {
    return tensor; // a number on the host: the Meta kernels written in Python want it as it is
  }
  auto& entry = entries_[tensor.storage().unsafeGetStorageImpl()];
  if (!entry.real.defined()) {
    entry.real = tensor;
    entry.shadow = c10::Storage(
        c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::GetAllocator(at::kMeta),
        /*resizable=*/true);
  }
  auto shadow = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(entry.shadow), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
  shadow.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return shadow;
}

at::Tensor Shadows::real_view(const at::Tensor& shadow_view) const {
  for (const auto& [storage, entry] : entries_) {
    if (entry.shadow.is_alias_of(shadow_view.storage())) {
      return view_of(entry.real, shadow_view);
    }
  }
  TORCH_INTERNAL_ASSERT(false, "fakeacc: a view of none of the arguments");
}

} // namespace fakeacc

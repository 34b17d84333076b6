// Tensors in fake device memory, and what queued tasks see of them.
#pragma once

#include "machine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

namespace fakeacc {

bool is_fake(const at::Tensor& tensor);

at::Tensor empty_strided(
    int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Another tensor over the storage of `base`, with the geometry and dtype of `like`.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like);

// Gives an output tensor the geometry its operator computed for it.
void resize_output(const at::Tensor& output, at::IntArrayRef sizes, at::IntArrayRef strides);

// The bytes a tensor spans.
Access access_of(const at::Tensor& tensor, bool write);

// A CPU tensor over the same memory, for a queued task. It keeps nothing alive: a closure that
// held the storage would hide every missing record_stream.
at::Tensor alias_of(const at::Tensor& tensor);

// A copy of host values for a queued task. A task gets no tensor that Python may know: to release
// that one the stream's thread would need the GIL.
at::Tensor private_copy(const at::Tensor& host);

// What a stream's thread needs around everything that calls an operator.
class OnWorker {
 public:
  OnWorker();

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  at::NoGradGuard no_grad_;
  at::DisableRecordFunctionGuard unobserved_; // the host watch must not see device memory
};

} // namespace fakeacc

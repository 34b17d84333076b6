// Operators that the fallback cannot do: allocation, copies, storages, and a few that would draw
// random numbers or recurse.
#include "allocators.h"
#include "device.h"
#include "fallback.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

namespace fakeacc {

namespace {

using at::Tensor;
using torch::jit::Stack;

// --- allocation -------------------------------------------------------------------------------

int device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

Tensor empty_memory_format(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(
      layout.value_or(at::kStrided) == at::kStrided, "fakeacc has strided tensors only, no ",
      *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(fake_device(device_or_current(device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      memory_format);
}

Tensor empty_with_strides(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pin_memory*/) {
  return empty_strided(
      device_or_current(device), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      c10::dtype_or_default(dtype));
}

// --- copies -----------------------------------------------------------------------------------

void queue_copy(Stream& stream, const Tensor& from, const Tensor& to, const char* what) {
  Launch task{.operation = what, .copied_bytes = to.nbytes()};
  const bool inside_device = is_fake(from) && is_fake(to) && from.device() == to.device();
  task.kind = inside_device ? TaskKind::kernel : TaskKind::copy;
  task.accesses = {access_of(from, false), access_of(to, true)};
  task.run = [from = alias_of(from), to = alias_of(to)] {
    const OnWorker worker;
    to.copy_(from);
  };
  Machine::get().launch(stream, std::move(task));
}

// Whether the bytes can be moved as they are. Else CUDA makes temporaries, on the host before an
// upload and after a download, and that is what a caller must reckon with.
bool same_layout(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && !a.is_conj() && !b.is_conj() && !a.is_neg() && !b.is_neg() &&
      a.is_non_overlapping_and_dense() && (a.strides() == b.strides() ||
                                           (a.is_contiguous() && b.is_contiguous()));
}

void upload(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& stream = current_stream(to.device().index());
  const bool contiguous = from.is_contiguous() && from.dtype() == to.dtype();
  if (from.is_pinned() && (contiguous || same_layout(from, to))) {
    queue_copy(stream, from, to, "the upload");
  } else {
    // Pageable memory: the values are those at the time of the call, blocking or not. The task
    // owns the copy; the accesses name only what others can see.
    Launch task{.operation = "the upload", .kind = TaskKind::copy, .copied_bytes = to.nbytes()};
    task.accesses = {access_of(to, true)};
    task.run = [staged = private_copy(from), alias = alias_of(to)] {
      const OnWorker worker;
      alias.copy_(staged);
    };
    Machine::get().launch(stream, std::move(task));
  }
  if (!non_blocking) {
    Machine::get().synchronize(stream);
  }
}

void download(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& stream = current_stream(from.device().index());
  const bool direct = to.is_contiguous() || same_layout(from, to);
  if (!direct || to.is_conj() || to.is_neg()) {
    const auto staged = at::empty(to.sizes(), to.options().pinned_memory(false));
    download(from, staged, false);
    to.copy_(staged);
    return;
  }
  const bool pinned = to.is_pinned();
  if (pinned) {
    Machine::get().poison_before_write(access_of(to, true));
  }
  queue_copy(stream, from, to, "the download");
  if (!non_blocking || !pinned) {
    Machine::get().synchronize(stream);
  }
}

// A peer copy runs on the source's stream and is ordered with the current streams of both ends.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto& machine = Machine::get();
  auto& source = current_stream(from.device().index());
  auto& destination = current_stream(to.device().index());
  machine.wait(source, machine.record(destination));
  queue_copy(source, from, to, "the peer copy");
  machine.wait(destination, machine.record(source));
}

Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) {
    return destination;
  }
  const auto from = self.sizes() == destination.sizes() ? self : self.expand(destination.sizes());
  if (!is_fake(from)) {
    upload(from, destination, non_blocking);
  } else if (!is_fake(destination)) {
    download(from, destination, non_blocking);
  } else if (from.device() == destination.device()) {
    queue_copy(current_stream(from.device().index()), from, destination, "aten::copy_");
  } else {
    copy_between_devices(from, destination);
  }
  return destination;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  const auto host = at::empty(self.sizes(), self.options().device(at::kCPU));
  download(self, host, false);
  return host.item();
}

// --- storages ---------------------------------------------------------------------------------

const Tensor& resize(
    const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (memory_format) {
    impl->empty_tensor_restride(*memory_format);
  }
  resize_output(self, self.sizes().vec(), self.strides().vec());
  return self;
}

Tensor& set_storage(
    Tensor& self,
    c10::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto first = offset.expect_int();
  at::native::checkSetStorage<int64_t>(
      self, std::move(source), first, sizes, C10_AS_INTARRAYREF_SLOW(stride));
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(first);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), first);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymInt(elements), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
      c10::fromIntArrayRefSlow(source.strides()));
}

Tensor& set_empty(Tensor& self) {
  c10::Storage none(
      c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), device_allocator(),
      true);
  return set_storage(self, std::move(none), 0, c10::SymInt(0), {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  Machine::get().record_stream(self.storage().data(), to_fake(stream));
}

// Module.to keeps Parameter objects, and `param.data = tensor` is allowed, between two tensors
// that differ only in where their memory is.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  const auto dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_fake(tensor));
  };
  return dense(self) && dense(from);
}

// --- the rest ---------------------------------------------------------------------------------

// The CPU kernel draws without a generator argument, so it is built from operators that have one.
std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || probability == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - probability);
  const double scale = probability == 1 ? 0 : 1 / (1 - probability);
  return {input.mul(mask).mul_(scale), mask};
}

// torch leaves convolutions of devices it does not know to these two. On the CPU they mean the
// public operators, whose CPU and Meta kernels the fallback can use.
void convolution(const c10::OperatorHandle& /*op*/, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

void convolution_backward(const c10::OperatorHandle& /*op*/, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  constexpr size_t kOwnArguments = 10;
  const auto grad_output = torch::jit::peek(*stack, 0, kOwnArguments).toTensor();
  // (grad_output, input, weight, bias_sizes, ...): the overrideable form lacks the fourth.
  const std::vector<int64_t> bias_sizes{grad_output.size(1)};
  stack->insert(stack->end() - kOwnArguments + 3, c10::IValue(bias_sizes));
  fallback(op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_with_strides);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

// The fallbacks of these keys resolve the bit with a clone, which is a copy, which would come here
// again. queue_copy carries the bits over to its aliases instead.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace fakeacc

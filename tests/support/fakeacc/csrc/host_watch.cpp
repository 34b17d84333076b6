#include "host_watch.h"

#include "boxed.h"
#include "machine.h"
#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string_view>

namespace fakeacc {

namespace {

// Kernels on the CPU that look at or change a tensor's geometry only.
constexpr std::array<std::string_view, 4> kGeometryOnly{
    "aten::resize_", "aten::set_", "aten::is_set_to", "aten::_resize_output_"};

bool all_on_host(c10::ArrayRef<const c10::IValue> inputs) {
  bool on_host = true;
  for (const auto& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      on_host &= !tensor.defined() || tensor.is_cpu();
    });
  }
  return on_host;
}

bool any_pinned(c10::ArrayRef<const c10::IValue> inputs) {
  bool pinned = false;
  for (const auto& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      pinned |= tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
          Machine::get().is_pinned(tensor.storage().data());
    });
  }
  return pinned;
}

// Whether the operator itself touches memory. Composite ones call others that will be seen, and a
// kernel that returns a view of an argument looks at its geometry only.
bool touches_memory(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const bool returns_view = std::ranges::any_of(schema.returns(), [](const auto& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
  return !returns_view && std::ranges::find(kGeometryOnly, schema.name()) == kGeometryOnly.end() &&
      (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || schema.name() == "aten::copy_");
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  if (!all_on_host(inputs) || !any_pinned(inputs)) {
    return nullptr;
  }
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!op || !touches_memory(*op)) {
    return nullptr;
  }
  const auto& arguments = op->schema().arguments();
  for (size_t i = 0; i < std::min(inputs.size(), arguments.size()); ++i) {
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.numel() > 0) {
        Machine::get().check_host_access(
            toString(*name), access_of(tensor, is_written(arguments[i])));
      }
    });
  }
  return nullptr;
}

} // namespace

void set_host_watch(bool on) {
  static std::optional<at::CallbackHandle> callback; // guarded by the GIL, as its only caller is
  if (on && !callback) {
    callback = at::addGlobalCallback(at::RecordFunctionCallback(&before_operator)
                                         .needsInputs(true)
                                         .scopes({at::RecordScope::FUNCTION}));
  } else if (!on && callback) {
    at::removeCallback(*callback);
    callback.reset();
  }
}

} // namespace fakeacc

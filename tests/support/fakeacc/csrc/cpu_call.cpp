#include "cpu_call.h"

#include "boxed.h"
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>

namespace fakeacc {

torch::jit::Stack CpuCall::run() const {
  const OnWorker worker;
  torch::jit::Stack stack = arguments;
  if (generator_argument) {
    stack[*generator_argument] = at::detail::createCPUGenerator(seed);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

void write_results(
    const std::vector<at::Tensor>& aliases,
    const std::vector<at::Tensor>& results,
    const std::string& operation) {
  const OnWorker worker;
  TORCH_INTERNAL_ASSERT(aliases.size() == results.size(), operation);
  for (size_t i = 0; i < aliases.size(); ++i) {
    if (!aliases[i].defined() || !results[i].defined()) {
      continue;
    }
    TORCH_CHECK(
        aliases[i].sizes() == results[i].sizes(), "the Meta kernel of ", operation, " promises ",
        aliases[i].sizes(), ", the CPU kernel gives ", results[i].sizes(),
        ": the fallback must run this operator at once");
    aliases[i].copy_(results[i]);
  }
}

std::vector<at::Tensor> tensors_of(
    const torch::jit::Stack& values, const std::vector<bool>& wanted) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < values.size(); ++i) {
    if (wanted[i]) {
      for_each_tensor(values[i], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    }
  }
  return tensors;
}

std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  for (const auto& tensor : tensors) {
    aliases.push_back(tensor.defined() ? alias_of(tensor) : tensor);
  }
  return aliases;
}

} // namespace fakeacc

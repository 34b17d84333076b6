// The half of an operator call that runs on a stream's thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fakeacc {

// Holds nothing that Python or a storage owns.
struct CpuCall {
  c10::OperatorHandle op;
  // Device tensors as aliases, but out= ones as empty tensors: CPU kernels resize those freely,
  // some even to another size and back, which the real ones must not see.
  torch::jit::Stack arguments;
  std::optional<size_t> generator_argument;
  uint64_t seed = 0;

  torch::jit::Stack run() const;
};

// Writes what the CPU kernel gave into the memory that was promised for it.
void write_results(
    const std::vector<at::Tensor>& aliases,
    const std::vector<at::Tensor>& results,
    const std::string& operation);

// The tensors among `values` for which `wanted` says so, by position.
std::vector<at::Tensor> tensors_of(
    const torch::jit::Stack& values, const std::vector<bool>& wanted);

std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& tensors);

} // namespace fakeacc

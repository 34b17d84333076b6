// Tensors inside boxed arguments: alone, in lists, in lists of optionals.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace fakeacc {

// Calls `visit` with every tensor in the value, undefined ones included.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      visit(tensor.value_or(at::Tensor()));
    }
  }
}

// The value with `map` of every tensor in its place.
template <typename Map>
c10::IValue map_tensors(const c10::IValue& value, Map map) {
  if (value.isTensor()) {
    return at::Tensor(map(value.toTensor()));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(map(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

inline bool is_written(const c10::Argument& declared) {
  return declared.alias_info() != nullptr && declared.alias_info()->isWrite();
}

} // namespace fakeacc

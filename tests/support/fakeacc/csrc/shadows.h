// Tensors without memory that stand in for device tensors when a Meta kernel runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <utility>

namespace fakeacc {

// The shadows of one call share storages where the real tensors do, so that a Meta kernel notices
// overlaps, and so that the views it returns can be told from new tensors.
class Shadows {
 public:
  at::Tensor of(const at::Tensor& tensor);

  // The view of the real tensor that corresponds to a view of its shadow.
  at::Tensor real_view(const at::Tensor& shadow_view) const;

 private:
  struct Entry {
    c10::Storage shadow;
    at::Tensor real; // any of the tensors in the storage
  };
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
};

} // namespace fakeacc

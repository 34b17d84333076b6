#include "fallback.h"

#include "boxed.h"
#include "cpu_call.h"
#include "device.h"
#include "generator.h"
#include "shadows.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fakeacc {

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

// Operators that take index tensors from the host too, and read a bool one as a mask.
bool is_indexing(std::string_view name) {
  return is_one_of(
      name, {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
             "aten::_unsafe_index_put", "aten::_index_put_impl_"});
}

class Call {
 public:
  Call(const OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        arguments_(torch::jit::last(*stack, op.schema().arguments().size()).vec()) {
    find_device();
    find_generator();
  }

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "fakeacc runs ",
        schema_.operator_name(), " through its CPU kernel, but it has none");
    if (must_wait() || !queue()) {
      run_and_wait();
    }
  }

 private:
  // --- what is called -----------------------------------------------------------------------

  void find_device() {
    std::optional<int> found;
    for (const auto& argument : arguments_) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (!found && is_fake(tensor)) {
          found = tensor.device().index();
        }
      });
      if (!found && argument.isDevice() && argument.toDevice().has_index()) {
        found = argument.toDevice().index();
      }
    }
    device_ = found.value_or(current_device());
    for (size_t i = 0; i < arguments_.size(); ++i) {
      for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) { check_device(tensor, i); });
    }
  }

  void check_device(const at::Tensor& tensor, size_t argument) const {
    if (!tensor.defined() || tensor.device() == fake_device(device_)) {
      return;
    }
    const auto& declared = schema_.arguments()[argument];
    const bool host_values = tensor.device().is_cpu() && !is_written(declared) &&
        (tensor.dim() == 0 || is_indexing(schema_.name()));
    TORCH_CHECK(
        host_values,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        fake_device(device_), " and ", tensor.device(), "! (when checking argument ",
        declared.name(), " of ", schema_.operator_name(), ")");
  }

  void find_generator() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) {
      return;
    }
    const auto optional_generator = c10::OptionalType::create(c10::GeneratorType::get());
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].type()->isSubtypeOf(*optional_generator)) {
        generator_argument_ = i;
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        generator_argument_, "fakeacc cannot run ", schema_.operator_name(),
        ": it draws random numbers but takes no generator");
    const auto& given = arguments_[*generator_argument_];
    const auto generator = given.isNone() ? default_generator(device_) : given.toGenerator();
    TORCH_CHECK(
        generator.device() == fake_device(device_), "Expected a generator of ",
        fake_device(device_), " but found one of ", generator.device());
    seed_ = next_launch_seed(generator);
  }

  bool must_wait() const {
    // The CPU kernels of these give the lesser results other shapes than their Meta kernels say.
    const bool shapes_disagree = is_one_of(
        schema_.name(),
        {"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_embedding_bag",
         "aten::_embedding_bag_forward_only"});
    const bool returns_tensors = std::ranges::all_of(schema_.returns(), [](const auto& result) {
      return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
          result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    });
    return op_.hasTag(at::Tag::data_dependent_output) ||
        op_.hasTag(at::Tag::dynamic_output_shape) || shapes_disagree || !returns_tensors ||
        (is_indexing(schema_.name()) && has_mask()); // out= forms lack the tags
  }

  bool has_mask() const {
    bool found = false;
    for (const auto& argument : arguments_) {
      if (argument.isOptionalTensorList()) {
        for_each_tensor(argument, [&](const at::Tensor& index) {
          found |= index.defined() &&
              (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
        });
      }
    }
    return found;
  }

  bool writes_an_argument() const {
    return std::ranges::any_of(schema_.arguments(), is_written);
  }

  // --- queued -------------------------------------------------------------------------------

  // False if no Meta kernel tells the shapes; then nothing has happened yet.
  bool queue() {
    Shadows shadows;
    const Stack shadow_arguments = meta_arguments(shadows);
    Stack shadow_results = shadow_arguments;
    if (!run_meta(&shadow_results)) {
      return false;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].is_out()) {
        resize_outputs(arguments_[i], shadow_arguments[i]);
      }
    }
    Stack results;
    std::vector<at::Tensor> fresh;
    for (size_t i = 0; i < shadow_results.size(); ++i) {
      results.push_back(result_like(shadow_results[i], schema_.returns()[i], shadows, fresh));
    }
    if (!fresh.empty() || writes_an_argument() || results.empty()) {
      launch(fresh, replay(fresh));
    }
    finish(results);
    return true;
  }

  Stack meta_arguments(Shadows& shadows) const {
    Stack arguments;
    for (const auto& argument : arguments_) {
      if (argument.isDevice()) {
        arguments.emplace_back(at::Device(at::kMeta));
      } else if (argument.isGenerator()) {
        arguments.emplace_back();
      } else {
        arguments.push_back(
            map_tensors(argument, [&](const at::Tensor& tensor) { return shadows.of(tensor); }));
      }
    }
    return arguments;
  }

  bool run_meta(Stack* stack) const {
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
      return false;
    }
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
    } catch (const c10::NotImplementedError&) {
      return false;
    } catch (const python_error& error) {
      // From a Meta kernel written in Python: its NotImplementedError is no c10 one.
      const pybind11::gil_scoped_acquire gil;
      if (PyErr_GivenExceptionMatches(error.type, PyExc_NotImplementedError) == 0) {
        throw;
      }
      return false;
    }
    return true;
  }

  static void resize_outputs(const IValue& outputs, const IValue& shadows) {
    std::vector<at::Tensor> shapes;
    for_each_tensor(shadows, [&](const at::Tensor& shape) { shapes.push_back(shape); });
    auto shape = shapes.begin();
    for_each_tensor(outputs, [&](const at::Tensor& output) {
      if (output.defined() && output.sizes() != shape->sizes()) {
        resize_output(output, shape->sizes(), shape->strides());
      }
      ++shape;
    });
  }

  // The result that the caller gets: an argument, a view of one, or a new tensor.
  IValue result_like(
      const IValue& shadow,
      const c10::Argument& declared,
      const Shadows& shadows,
      std::vector<at::Tensor>& fresh) const {
    if (is_written(declared)) {
      return written_argument(declared);
    }
    return map_tensors(shadow, [&](const at::Tensor& shape) {
      if (declared.alias_info() != nullptr) {
        return shadows.real_view(shape);
      }
      fresh.push_back(shape.defined() ? allocate_like(shape) : shape);
      return fresh.back();
    });
  }

  // The task: the CPU kernel, then what it gave into the memory promised for it.
  std::function<void()> replay(const std::vector<at::Tensor>& fresh) const {
    const auto out = out_arguments();
    std::vector<bool> is_new;
    for (const auto& declared : schema_.returns()) {
      is_new.push_back(declared.alias_info() == nullptr);
    }
    return [call = cpu_call(), out, is_new, outputs = aliases_of(tensors_of(arguments_, out)),
            results = aliases_of(fresh), name = schema_.name()] {
      const Stack returned = call.run();
      write_results(outputs, tensors_of(call.arguments, out), name);
      write_results(results, tensors_of(returned, is_new), name);
    };
  }

  // --- at once ------------------------------------------------------------------------------

  void run_and_wait() {
    struct Outcome {
      Stack results;
      std::exception_ptr error;
    };
    auto outcome = std::make_shared<Outcome>();
    const auto call = cpu_call();
    launch({}, [call, outcome] {
      try {
        outcome->results = call.run();
      } catch (...) {
        outcome->error = std::current_exception(); // for this caller, not for the next host wait
      }
    });
    Machine::get().synchronize(current_stream(device_));
    if (outcome->error) {
      std::rethrow_exception(outcome->error);
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].is_out()) {
        resize_outputs(arguments_[i], call.arguments[i]);
        upload(call.arguments[i].toTensor(), arguments_[i].toTensor());
      }
    }
    Stack results;
    for (size_t i = 0; i < outcome->results.size(); ++i) {
      const auto& declared = schema_.returns()[i];
      results.push_back(
          is_written(declared) ? written_argument(declared)
                               : map_tensors(outcome->results[i], [&](const at::Tensor& result) {
                                   return uploaded(result);
                                 }));
    }
    finish(results);
  }

  at::Tensor uploaded(const at::Tensor& result) const {
    if (!result.defined()) {
      return result;
    }
    auto tensor = allocate_like(result);
    upload(result, tensor);
    return tensor;
  }

  void upload(const at::Tensor& from, const at::Tensor& to) const {
    Launch task{.operation = schema_.name() + " (result)"};
    task.accesses = {access_of(to, true)};
    task.run = [from, alias = alias_of(to), name = schema_.name()] {
      write_results({alias}, {from}, name);
    };
    Machine::get().launch(current_stream(device_), std::move(task));
  }

  // --- both ---------------------------------------------------------------------------------

  std::vector<bool> out_arguments() const {
    std::vector<bool> out;
    for (const auto& declared : schema_.arguments()) {
      out.push_back(declared.is_out());
    }
    return out;
  }

  CpuCall cpu_call() const {
    CpuCall call{op_, {}, generator_argument_, seed_};
    const auto out = out_arguments();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].isDevice()) {
        call.arguments.emplace_back(at::Device(at::kCPU));
        continue;
      }
      call.arguments.push_back(map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        if (!tensor.defined()) {
          return tensor;
        }
        if (out[i]) {
          return at::Tensor(at::detail::empty_cpu({0}, tensor.scalar_type()));
        }
        return is_fake(tensor) ? alias_of(tensor) : private_copy(tensor);
      }));
    }
    return call;
  }

  void launch(const std::vector<at::Tensor>& fresh, std::function<void()> run) const {
    Launch task{.operation = toString(schema_.operator_name())};
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool written = is_written(schema_.arguments()[i]);
      for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (is_fake(tensor)) {
          task.accesses.push_back(access_of(tensor, written));
        }
      });
    }
    for (const auto& tensor : fresh) {
      if (tensor.defined()) {
        task.accesses.push_back(access_of(tensor, true));
      }
    }
    // In-place operators come here as out= ones, with one tensor as both: a write says it all.
    const auto accesses = task.accesses;
    std::erase_if(task.accesses, [&](const Access& read) {
      return !read.write && std::ranges::any_of(accesses, [&](const Access& other) {
        return other.write && other.begin == read.begin && other.bytes == read.bytes;
      });
    });
    task.run = std::move(run);
    Machine::get().launch(current_stream(device_), std::move(task));
  }

  at::Tensor allocate_like(const at::Tensor& shape) const {
    return empty_strided(device_, shape.sizes(), shape.strides(), shape.scalar_type());
  }

  IValue written_argument(const c10::Argument& declared) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* info = schema_.arguments()[i].alias_info();
      if (info != nullptr && *info == *declared.alias_info()) {
        return arguments_[i];
      }
    }
    TORCH_INTERNAL_ASSERT(false, "fakeacc: a result is written, but no argument is");
  }

  void finish(const Stack& results) {
    torch::jit::drop(*stack_, arguments_.size());
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  Stack arguments_;
  int device_ = 0;
  std::optional<size_t> generator_argument_;
  uint64_t seed_ = 0;
};

} // namespace

void fallback(const OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace fakeacc

// Runs any operator on a fake device, through its CPU kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fakeacc {

// Queued, the normal case: the operator's Meta kernel runs on shadows of the arguments and tells
// the shapes of the results; the results are allocated; a task is queued that runs the CPU kernel
// on aliases of the memory. The caller goes on at once, as after a kernel launch.
//
// At once, where the shapes depend on the data, or a result is no tensor, or there is no (good)
// Meta kernel: the task is queued, waited for, and the results allocated afterwards.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace fakeacc

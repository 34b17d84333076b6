// Random numbers of the devices.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace fakeacc {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// The seed of the next launch that draws from `generator`.
uint64_t next_launch_seed(const at::Generator& generator);

} // namespace fakeacc

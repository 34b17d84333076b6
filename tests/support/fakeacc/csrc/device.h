// Current device and streams of the calling host thread.
#pragma once

#include "machine.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace fakeacc {

constexpr c10::DeviceType kFake = c10::DeviceType::PrivateUse1;

inline c10::Device fake_device(int index) {
  return {kFake, static_cast<c10::DeviceIndex>(index)};
}

// Per host thread, as on CUDA: device 0 and the default streams at first.
int current_device();
void set_current_device(int device);
Stream& current_stream(int device);

Stream& to_fake(const c10::Stream& stream);
c10::Stream to_torch(const Stream& stream);

} // namespace fakeacc

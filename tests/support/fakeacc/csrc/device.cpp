// The device guard and the hooks: how torch drives streams, events and devices.
#include "device.h"

#include "allocators.h"
#include "generator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <memory>

namespace fakeacc {

namespace {

thread_local int current_device_index = 0;
thread_local std::array<int, Machine::kMaxDevices> current_stream_ids{};

// What torch holds as a void*: an event that has been recorded at least once.
struct Event {
  MarkPtr mark;
};

Event& to_event(void* handle) {
  return *static_cast<Event*>(handle);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kFake;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Device getDevice() const override {
    return fake_device(current_device());
  }

  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device_index = device.index();
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Machine::get().device_count());
  }

  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return {}; // every dtype
  }

  c10::Stream getStream(c10::Device device) const override {
    return to_torch(current_stream(index_of(device)));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_torch(Machine::get().stream(index_of(device), 0));
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return to_torch(Machine::get().new_stream(index_of(device)));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = getStream(stream.device());
    current_stream_ids.at(static_cast<size_t>(stream.device_index())) = to_fake(stream).id;
    return previous;
  }

  bool queryStream(const c10::Stream& stream) const override {
    return Machine::get().query(to_fake(stream));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::get().synchronize(to_fake(stream));
  }

  void synchronizeDevice(c10::DeviceIndex device) const override {
    Machine::get().synchronize_device(device < 0 ? current_device() : device);
  }

  void record(
      void** event,
      const c10::Stream& stream,
      c10::DeviceIndex device,
      c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(
        device < 0 || device == stream.device_index(), "an event of fakeacc:", int{device},
        " cannot be recorded on a stream of fakeacc:", int{stream.device_index()});
    if (*event == nullptr) {
      *event = new Event;
    }
    to_event(*event).mark = Machine::get().record(to_fake(stream));
  }

  void block(void* event, const c10::Stream& stream) const override {
    Machine::get().wait(to_fake(stream), to_event(event).mark);
  }

  bool queryEvent(void* event) const override {
    return Machine::get().query(to_event(event).mark);
  }

  void synchronizeEvent(void* event) const override {
    Machine::get().synchronize(to_event(event).mark);
  }

  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

  double elapsedTime(void* first, void* second, c10::DeviceIndex /*device*/) const override {
    const auto elapsed = to_event(second).mark->reached - to_event(first).mark->reached;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Machine::get().record_stream(data.get(), to_fake(stream));
  }

 private:
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return Machine::get().device_count() > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(Machine::get().device_count());
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = getCurrentDevice();
    set_current_device(device);
    return previous;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  bool isPinnedPtr(const void* data) const override {
    return Machine::get().is_pinned(data);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  at::Device getDeviceFromPtr(void* data) const override {
    const int device = Machine::get().device_of(data);
    return device == Heap::kHost ? at::Device(at::kCPU) : fake_device(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

int current_device() {
  return current_device_index;
}

void set_current_device(int device) {
  Machine::get().check_device(device);
  current_device_index = device;
}

Stream& current_stream(int device) {
  Machine::get().check_device(device);
  return Machine::get().stream(device, current_stream_ids[static_cast<size_t>(device)]);
}

Stream& to_fake(const c10::Stream& stream) {
  TORCH_CHECK(
      stream.device_type() == kFake, "expected a stream of fakeacc, got one of ", stream.device());
  return Machine::get().stream(stream.device_index(), stream.id());
}

c10::Stream to_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, fake_device(stream.device), stream.id);
}

} // namespace fakeacc

#include "generator.h"

#include "device.h"

#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>
#include <vector>

namespace fakeacc {

namespace {

// A seed and the number of launches that have drawn so far. Each launch takes the next offset on
// the host and gives its queued kernel a generator of its own, so the numbers depend on the order
// of the launches and not on when they run, as with the counter-based generators of real devices.
class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl(fake_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }

  uint64_t current_seed() const override {
    return seed_;
  }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }

  uint64_t get_offset() const override {
    return offset_;
  }

  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    std::array<uint64_t, 2> words{};
    TORCH_CHECK(
        state.numel() == sizeof(words), "a random state of fakeacc has ", sizeof(words),
        " bytes, not ", state.numel());
    std::memcpy(words.data(), state.data(), sizeof(words));
    seed_ = words[0];
    offset_ = words[1];
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const std::array<uint64_t, 2> words{seed_, offset_};
    auto state = at::detail::empty_cpu({sizeof(words)}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), words.data(), sizeof(words));
    return state.getIntrusivePtr();
  }

  // Two rounds of the splitmix64 finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
  // Generators, 2014), so that neighbouring offsets give unrelated seeds.
  uint64_t next_launch_seed() {
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15U * ++offset_;
    for (int round = 0; round < 2; ++round) {
      mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
      mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
      mixed ^= mixed >> 31;
    }
    return mixed;
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

} // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = [] { // leaked: torch hands out references to them
    auto* all = new std::vector<at::Generator>;
    for (int index = 0; index < Machine::get().device_count(); ++index) {
      all->push_back(new_generator(index));
    }
    return all;
  }();
  Machine::get().check_device(device);
  return (*generators)[static_cast<size_t>(device)];
}

at::Generator new_generator(int device) {
  Machine::get().check_device(device);
  return at::make_generator<GeneratorImpl>(device);
}

uint64_t next_launch_seed(const at::Generator& generator) {
  auto* impl = generator.get<GeneratorImpl>();
  const std::lock_guard guard(impl->mutex_);
  return impl->next_launch_seed();
}

} // namespace fakeacc

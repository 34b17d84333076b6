#include "machine.h"

#include "host_wait.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <utility>

namespace fakeacc {

Machine& Machine::get() {
  static auto* machine = new Machine; // leaked on purpose
  return *machine;
}

void Machine::start(int device_count) {
  TORCH_CHECK_VALUE(
      device_count >= 0 && device_count <= kMaxDevices, "fakeacc has 0 to ", kMaxDevices,
      " devices, not ", device_count);
  std::lock_guard guard(lock_);
  TORCH_CHECK(streams_.empty(), "fakeacc is started already");
  device_count_ = device_count;
  streams_.resize(static_cast<size_t>(device_count));
  for (auto& streams : streams_) {
    streams.resize(kStreamsPerDevice);
  }
  next_stream_.assign(static_cast<size_t>(device_count), 0);
  memory_.start(device_count);
}

void Machine::check_device(int64_t device) const {
  TORCH_CHECK(
      device >= 0 && device < device_count_, "invalid device fakeacc:", device, ": there are ",
      device_count_, " devices");
}

Stream& Machine::stream(int device, int64_t id) {
  std::lock_guard guard(lock_);
  return stream_locked(device, id);
}

Stream& Machine::stream_locked(int device, int64_t id) {
  check_device(device);
  TORCH_CHECK(id >= 0 && id < kStreamsPerDevice, "fakeacc has no stream ", id);
  auto& stream = streams_[static_cast<size_t>(device)][static_cast<size_t>(id)];
  if (!stream) {
    stream = std::make_unique<Stream>(
        device, static_cast<int>(id), slots_++,
        [this](const Stream& failed, const Task& task) { fail(failed, task); });
  }
  return *stream;
}

Stream& Machine::new_stream(int device) {
  std::lock_guard guard(lock_);
  check_device(device);
  auto& next = next_stream_[static_cast<size_t>(device)];
  next = next % (kStreamsPerDevice - 1) + 1;
  return stream_locked(device, next);
}

void Machine::launch(Stream& stream, Launch launch) {
  std::lock_guard guard(lock_);
  stream.clock.join(checker_.host);
  const auto entry = stream.pushed + 1;
  if (checker_.mode != CheckerMode::off) {
    check_accesses(stream, launch, entry);
  }
  for (const auto& access : launch.accesses) {
    Block* block = memory_.find(access.begin);
    if (block != nullptr && block->device == Heap::kHost) {
      block->users[&stream] = entry;
    }
  }
  const auto latency = draw_latency(launch);
  stream.push({std::move(launch.operation), latency, std::move(launch.run)});
}

void Machine::check_accesses(const Stream& stream, const Launch& launch, uint64_t entry) {
  const Actor actor{launch.operation, stream.name(), stream.slot, entry};
  bool clean = true;
  for (const auto& access : launch.accesses) {
    if (Block* block = memory_.find(access.begin)) {
      clean &= checker_.check(block->log, access, actor, stream.clock, block->name());
    }
  }
  TORCH_CHECK(
      clean || checker_.mode != CheckerMode::raise, "fakeacc: ",
      checker_.reports().empty() ? "" : checker_.reports().back().message);
  for (const auto& access : launch.accesses) {
    if (Block* block = memory_.find(access.begin)) {
      checker_.log(block->log, access, actor, stream.clock);
    }
  }
}

std::chrono::microseconds Machine::draw_latency(const Launch& launch) {
  double ms = launch.kind == TaskKind::copy
      ? latency_.copy_ms +
          latency_.copy_ms_per_mib * static_cast<double>(launch.copied_bytes) / (1 << 20)
      : latency_.kernel_ms;
  if (latency_.jitter_ms > 0) {
    ms += std::uniform_real_distribution<double>(0, latency_.jitter_ms)(random_);
  }
  return std::chrono::microseconds(static_cast<int64_t>(ms * 1000));
}

MarkPtr Machine::record(Stream& stream) {
  std::lock_guard guard(lock_);
  auto mark = std::make_shared<Mark>();
  mark->stream = &stream;
  // The stream's thread writes through a pointer the task owns: the event may be gone by then.
  mark->entry = stream.push(
      {"record", {}, [mark] { mark->reached = std::chrono::steady_clock::now(); }});
  mark->clock = stream.clock;
  return mark;
}

void Machine::wait(Stream& stream, const MarkPtr& mark) {
  std::lock_guard guard(lock_);
  stream.clock.join(mark->clock);
  if (mark->stream != &stream) {
    stream.push({"wait", {}, [mark] { mark->stream->wait_until_done(mark->entry); }});
  }
}

bool Machine::query(Stream& stream) {
  std::unique_lock guard(lock_);
  if (stream.done() < stream.pushed) {
    return false;
  }
  const auto seen = stream.clock;
  guard.unlock();
  finish_host_wait(stream, seen);
  return true;
}

bool Machine::query(const MarkPtr& mark) {
  if (!mark->done()) {
    return false;
  }
  finish_host_wait(*mark->stream, mark->clock);
  return true;
}

void Machine::synchronize(Stream& stream) {
  wait_for(stream);
  raise_error(stream.device);
}

void Machine::synchronize(const MarkPtr& mark) {
  wait_on_host(*mark->stream, mark->entry);
  finish_host_wait(*mark->stream, mark->clock);
}

void Machine::synchronize_device(int device) {
  check_device(device);
  for (int id = 0; id < kStreamsPerDevice; ++id) {
    std::unique_lock guard(lock_);
    auto* stream = streams_[static_cast<size_t>(device)][static_cast<size_t>(id)].get();
    guard.unlock();
    if (stream != nullptr) {
      wait_for(*stream);
    }
  }
  raise_error(device); // after all of them: a caller that catches it finds the device idle
}

void Machine::wait_for(Stream& stream) {
  std::unique_lock guard(lock_);
  const auto entry = stream.pushed;
  const auto seen = stream.clock;
  guard.unlock();
  wait_on_host(stream, entry);
  guard.lock();
  checker_.host.join(seen);
}

void Machine::finish_host_wait(Stream& stream, const VectorClock& seen) {
  {
    std::lock_guard guard(lock_);
    checker_.host.join(seen);
  }
  raise_error(stream.device);
}

void Machine::fail(const Stream& stream, const Task& task) {
  std::string what = "unknown exception";
  try {
    throw;
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) { // NOLINT: a kernel may throw anything, and the thread must survive it
  }
  std::lock_guard guard(lock_);
  errors_.emplace(stream.device, task.name + " failed on stream " + stream.name() + ": " + what);
}

void Machine::raise_error(int device) {
  std::unique_lock guard(lock_);
  auto error = errors_.extract(device);
  guard.unlock();
  if (error) {
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, "fakeacc: " + error.mapped());
  }
}

Block* Machine::allocate(int device, size_t bytes, Stream* owner) {
  std::unique_lock guard(lock_);
  return memory_.heap(device).allocate(guard, bytes, owner);
}

void Machine::free(Block* block) {
  std::lock_guard guard(lock_);
  memory_.heap(block->device).free(block);
}

void Machine::record_stream(const void* address, Stream& stream) {
  std::lock_guard guard(lock_);
  Block* block = memory_.find(address);
  if (block != nullptr && block->device != Heap::kHost && block->owner != &stream) {
    block->users[&stream] = stream.pushed;
  }
}

void Machine::empty_cache(int device) {
  std::unique_lock guard(lock_);
  memory_.heap(device).empty_cache(guard);
}

bool Machine::is_pinned(const void* address) {
  std::lock_guard guard(lock_);
  const Block* block = memory_.find(address);
  return block != nullptr && block->device == Heap::kHost;
}

int Machine::device_of(const void* address) {
  std::lock_guard guard(lock_);
  const Block* block = memory_.find(address);
  return block == nullptr ? Heap::kHost : block->device;
}

void Machine::check_host_access(const std::string& operation, const Access& access) {
  std::lock_guard guard(lock_);
  const Block* block = memory_.find(access.begin);
  if (checker_.mode == CheckerMode::off || block == nullptr || block->device != Heap::kHost) {
    return;
  }
  const Actor actor{operation, "the host", 0, 0};
  checker_.check(block->log, access, actor, checker_.host, block->name());
}

void Machine::poison_before_write(const Access& access) {
  std::lock_guard guard(lock_);
  const Block* block = memory_.find(access.begin);
  if (memory_.poison && block != nullptr && block->device == Heap::kHost && block->users_done()) {
    std::memset(reinterpret_cast<void*>(access.begin), kPoisonByte, access.bytes);
  }
}

void Machine::set_checker(CheckerMode mode) {
  std::lock_guard guard(lock_);
  checker_.mode = mode;
}

void Machine::set_poison(bool poison) {
  std::lock_guard guard(lock_);
  memory_.poison = poison;
}

void Machine::set_latency(const Latency& latency, uint64_t seed) {
  std::lock_guard guard(lock_);
  latency_ = latency;
  random_.seed(seed);
}

std::vector<Report> Machine::reports() {
  std::lock_guard guard(lock_);
  return checker_.reports();
}

void Machine::clear_reports() {
  std::lock_guard guard(lock_);
  checker_.clear();
}

} // namespace fakeacc

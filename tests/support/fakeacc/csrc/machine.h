// The fake machine: devices, their streams and memory, and everything a test can turn.
//
// A host thread calls launch, record and wait. Each of them decides, under one lock, what comes
// before what, and pushes a task; the threads of the streams carry the tasks out. A record makes
// a new mark, and a wait binds to the mark it saw. As both push under that one lock, a wait is
// pushed after the record it waits for, so a stream's thread may simply block on it: a cycle of
// waiting streams would need a record pushed after the wait that saw it.
#pragma once

#include "checker.h"
#include "memory.h"
#include "stream.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace fakeacc {

enum class TaskKind { kernel, copy };

struct Launch {
  std::string operation;
  TaskKind kind = TaskKind::kernel;
  size_t copied_bytes = 0;
  std::vector<Access> accesses = {};
  std::function<void()> run = {};
};

// What a recorded event stands for: a point in a stream.
struct Mark {
  Stream* stream = nullptr;
  uint64_t entry = 0;
  VectorClock clock;
  std::chrono::steady_clock::time_point reached; // set by the stream's thread at the mark

  bool done() const {
    return stream->done() >= entry;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

struct Latency {
  double kernel_ms = 0;
  double copy_ms = 0;
  double copy_ms_per_mib = 0;
  double jitter_ms = 0; // up to this much more, drawn in launch order
};

class Machine {
 public:
  static constexpr int kMaxDevices = 8;
  static constexpr int kStreamsPerDevice = 32; // stream 0 is the default one

  // The one machine of the process. It is never destroyed: tensors may outlive everything.
  static Machine& get();

  void start(int device_count);
  int device_count() const {
    return device_count_;
  }
  void check_device(int64_t device) const;

  Stream& stream(int device, int64_t id);
  Stream& new_stream(int device); // dealt round robin from the pool, as on CUDA

  // Queues a task. With the checker on `raise`, a conflict throws and nothing is queued.
  void launch(Stream& stream, Launch launch);
  MarkPtr record(Stream& stream);
  void wait(Stream& stream, const MarkPtr& mark);

  // Host waits. All but the queries block. What they see complete comes, from then on, before
  // everything that is launched. Each raises the error of a kernel of that device, once.
  bool query(Stream& stream);
  bool query(const MarkPtr& mark);
  void synchronize(Stream& stream);
  void synchronize(const MarkPtr& mark);
  void synchronize_device(int device);

  Block* allocate(int device, size_t bytes, Stream* owner);
  void free(Block* block);
  void record_stream(const void* address, Stream& stream);
  void empty_cache(int device);
  bool is_pinned(const void* address);
  int device_of(const void* address);
  // What `use` makes of the device's heap, under the lock.
  template <typename Use>
  auto with_heap(int device, Use use) {
    check_device(device);
    std::lock_guard guard(lock_);
    return use(memory_.heap(device));
  }

  // The host is about to touch these bytes. Reports if they are pinned and a queued task that the
  // host has not waited for touches them too.
  void check_host_access(const std::string& operation, const Access& access);
  // Fills pinned bytes that a queued copy will write, so that a host that does not wait for the
  // copy reads NaNs. Not if a queued task still uses the block: reuse in stream order is fine.
  void poison_before_write(const Access& access);

  void set_checker(CheckerMode mode);
  void set_poison(bool poison);
  void set_latency(const Latency& latency, uint64_t seed);
  std::vector<Report> reports();
  void clear_reports();

 private:
  Stream& stream_locked(int device, int64_t id);
  void check_accesses(const Stream& stream, const Launch& launch, uint64_t entry);
  std::chrono::microseconds draw_latency(const Launch& launch);
  void fail(const Stream& stream, const Task& task);
  void raise_error(int device);
  void wait_for(Stream& stream);
  void finish_host_wait(Stream& stream, const VectorClock& seen);

  std::mutex lock_;
  int device_count_ = 0;
  Checker checker_;
  Memory memory_{checker_};
  std::vector<std::vector<std::unique_ptr<Stream>>> streams_; // [device][id], made when needed
  std::vector<int> next_stream_;
  size_t slots_ = 0;
  std::map<int, std::string> errors_; // first error of a device that no host wait has raised yet
  Latency latency_;
  std::mt19937_64 random_;
};

} // namespace fakeacc

// A stream: one thread that runs the tasks pushed to it, one after the other.
#pragma once

#include "clock.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

namespace fakeacc {

struct Task {
  std::string name;
  std::chrono::microseconds latency{0};
  std::function<void()> run;
};

class Stream {
 public:
  // Called on the stream's thread when a task throws, inside the catch block.
  using ErrorHandler = std::function<void(const Stream&, const Task&)>;

  Stream(int device, int id, size_t slot, ErrorHandler on_error);

  const int device;
  const int id;
  const size_t slot; // this stream's place in every vector clock

  // Both guarded by the machine's lock, as is push: the order of pushes is the order of everything.
  uint64_t pushed = 0; // tasks pushed so far; task n is the n-th one, counted from 1
  VectorClock clock; // what comes before the next task pushed here

  std::string name() const; // "fakeacc:0/2": stream 2 of device 0

  // Appends a task and returns its number. The first one starts the thread.
  uint64_t push(Task task);

  uint64_t done() const {
    return done_.load(std::memory_order_acquire);
  }

  // Blocks until `entry` tasks are done, however long that takes: for the threads of other streams.
  void wait_until_done(uint64_t entry);
  // The same with a time limit, for the host; false if the time ran out.
  bool wait_until_done(uint64_t entry, std::chrono::milliseconds limit);

  // While held, the thread starts no further task. Holds nest.
  void hold();
  void release();
  bool held();

 private:
  void work();

  ErrorHandler on_error_;
  std::mutex mutex_;
  std::condition_variable wake_; // a task came, or a hold ended
  std::condition_variable progress_; // a task is done
  std::deque<Task> tasks_;
  int holds_ = 0;
  bool started_ = false;
  std::atomic<uint64_t> done_{0};
};

} // namespace fakeacc

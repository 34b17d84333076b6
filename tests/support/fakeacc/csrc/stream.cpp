#include "stream.h"

#include <thread>
#include <utility>

namespace fakeacc {

Stream::Stream(int device, int id, size_t slot, ErrorHandler on_error)
    : device(device), id(id), slot(slot), on_error_(std::move(on_error)) {}

std::string Stream::name() const {
  return "fakeacc:" + std::to_string(device) + "/" + std::to_string(id);
}

uint64_t Stream::push(Task task) {
  ++pushed;
  clock.advance(slot, pushed);
  std::lock_guard guard(mutex_);
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    // Detached, as the whole machine is leaked: static destructors of torch must not meet a join.
    std::thread([this] { work(); }).detach();
  }
  wake_.notify_one();
  return pushed;
}

void Stream::work() {
  for (;;) {
    Task task;
    {
      std::unique_lock guard(mutex_);
      wake_.wait(guard, [this] { return !tasks_.empty() && holds_ == 0; });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (task.latency.count() > 0) {
      std::this_thread::sleep_for(task.latency);
    }
    try {
      task.run();
    } catch (...) {
      on_error_(*this, task);
    }
    task = {}; // whoever waits for this task may rely on its closure being gone
    {
      std::lock_guard guard(mutex_);
      done_.fetch_add(1, std::memory_order_release);
    }
    progress_.notify_all();
  }
}

void Stream::wait_until_done(uint64_t entry) {
  std::unique_lock guard(mutex_);
  progress_.wait(guard, [&] { return done() >= entry; });
}

bool Stream::wait_until_done(uint64_t entry, std::chrono::milliseconds limit) {
  std::unique_lock guard(mutex_);
  return progress_.wait_for(guard, limit, [&] { return done() >= entry; });
}

void Stream::hold() {
  std::lock_guard guard(mutex_);
  ++holds_;
}

void Stream::release() {
  std::lock_guard guard(mutex_);
  --holds_;
  wake_.notify_one();
}

bool Stream::held() {
  std::lock_guard guard(mutex_);
  return holds_ > 0;
}

} // namespace fakeacc

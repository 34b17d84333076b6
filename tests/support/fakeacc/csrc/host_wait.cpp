#include "host_wait.h"

#include <Python.h>

#include <c10/util/Exception.h>

namespace fakeacc {

namespace {

constexpr std::chrono::seconds kWaitLimit{60};

class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

} // namespace

void wait_on_host(Stream& stream, uint64_t entry) {
  if (stream.done() >= entry) {
    return;
  }
  bool over = false;
  {
    WithoutGil released;
    over = stream.wait_until_done(entry, kWaitLimit);
  }
  TORCH_CHECK(
      over, "fakeacc: the host waited ", kWaitLimit.count(), " s for task ", entry, " of stream ",
      stream.name(), ", which has done ", stream.done(),
      stream.held() ? " and is held by the test: a wait inside hold() cannot end"
                    : "; does it wait for a stream that is held?");
}

} // namespace fakeacc

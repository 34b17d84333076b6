// The happens-before checker: reports two accesses to the same bytes that nothing orders.
//
// Every queued task passes the machine, which knows what comes before it (a vector clock), so a
// missing wait is found from the order of the calls alone, whatever the threads happen to do.
#pragma once

#include "clock.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fakeacc {

enum class CheckerMode { off, collect, raise };

// Bytes an operator touches. A strided tensor counts as its whole span.
struct Access {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool write = false;

  uintptr_t end() const {
    return begin + bytes;
  }
};

// Who touches them: task `entry` of the stream in `slot`.
struct Actor {
  std::string operation;
  std::string stream;
  size_t slot = 0;
  uint64_t entry = 0;
};

struct LoggedAccess {
  Access access;
  Actor actor;
};

// The accesses to one memory block that a later access might race with.
using AccessLog = std::vector<LoggedAccess>;

struct Report {
  std::string message;
  std::string operation; // the access that came second in program order
  std::string other; // the one it is not ordered with
};

// Guarded by the machine's lock.
class Checker {
 public:
  CheckerMode mode = CheckerMode::collect;
  VectorClock host; // everything some thread of the host has seen complete

  // Holds `access` against the log, `before` being what comes before it. True if nothing is wrong.
  bool check(
      const AccessLog& log,
      const Access& access,
      const Actor& actor,
      const VectorClock& before,
      const std::string& block);

  // Enters an access into the log, dropping those that it makes redundant.
  void log(AccessLog& log, const Access& access, const Actor& actor, const VectorClock& before)
      const;

  const std::vector<Report>& reports() const {
    return reports_;
  }
  void clear() {
    reports_.clear();
  }

 private:
  std::vector<Report> reports_;
};

} // namespace fakeacc

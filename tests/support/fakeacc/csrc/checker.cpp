#include "checker.h"

#include <algorithm>

namespace fakeacc {

namespace {

constexpr size_t kMaxLoggedAccesses = 256; // per block
constexpr size_t kMaxReports = 1000;

bool overlap(const Access& a, const Access& b) {
  return a.begin < b.end() && b.begin < a.end();
}

bool covers(const Access& outer, const Access& inner) {
  return outer.begin <= inner.begin && inner.end() <= outer.end();
}

bool ordered(const LoggedAccess& logged, const VectorClock& before) {
  return before.at(logged.actor.slot) >= logged.actor.entry;
}

const char* verb(const Access& access) {
  return access.write ? "writes" : "reads";
}

std::string describe(
    const Access& access,
    const Actor& actor,
    const LoggedAccess& other,
    const std::string& block) {
  const auto begin = std::max(access.begin, other.access.begin);
  const auto end = std::min(access.end(), other.access.end());
  return actor.operation + " on " + actor.stream + " " + verb(access) + " " +
      std::to_string(end - begin) + " bytes of " + block + " that " + other.actor.operation +
      " on " + other.actor.stream + " " + verb(other.access) +
      ", and nothing makes the first wait for the second";
}

} // namespace

bool Checker::check(
    const AccessLog& log,
    const Access& access,
    const Actor& actor,
    const VectorClock& before,
    const std::string& block) {
  bool clean = true;
  for (const auto& other : log) {
    const bool conflict = (access.write || other.access.write) && overlap(access, other.access);
    if (!conflict || ordered(other, before)) {
      continue;
    }
    clean = false;
    if (reports_.size() < kMaxReports) {
      reports_.push_back(
          {describe(access, actor, other, block), actor.operation, other.actor.operation});
    }
  }
  return clean;
}

void Checker::log(
    AccessLog& log,
    const Access& access,
    const Actor& actor,
    const VectorClock& before) const {
  // Two kinds of entries can go without losing a report. What the host has seen complete comes
  // before every later task. And an entry that comes before this access, inside its bytes and not
  // stronger than it, can only race with what races with this access too.
  std::erase_if(log, [&](const LoggedAccess& old) {
    return ordered(old, host) ||
        (ordered(old, before) && covers(access, old.access) &&
         (access.write || !old.access.write));
  });
  if (log.size() >= kMaxLoggedAccesses) {
    log.erase(log.begin()); // a bound on time and memory, at the price of a possible miss
  }
  log.push_back({access, actor});
}

} // namespace fakeacc

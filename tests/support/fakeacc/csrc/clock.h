// Vector clocks: which tasks of which streams are known to be over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fakeacc {

// Every stream of the machine has a slot. Entry n in slot s says: the first n tasks of stream s
// come before whatever this clock is attached to.
class VectorClock {
 public:
  uint64_t at(size_t slot) const {
    return slot < entries_.size() ? entries_[slot] : 0;
  }

  void advance(size_t slot, uint64_t entry) {
    if (slot >= entries_.size()) {
      entries_.resize(slot + 1, 0);
    }
    if (entry > entries_[slot]) {
      entries_[slot] = entry;
    }
  }

  void join(const VectorClock& other) {
    for (size_t slot = 0; slot < other.entries_.size(); ++slot) {
      advance(slot, other.entries_[slot]);
    }
  }

 private:
  std::vector<uint64_t> entries_;
};

} // namespace fakeacc

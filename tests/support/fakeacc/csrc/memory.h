// Memory of the devices and pinned memory of the host: caching allocators with stream order.
#pragma once

#include "checker.h"
#include "stream.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fakeacc {

struct Block {
  uint64_t serial = 0; // for messages; survives reuse
  std::byte* data = nullptr;
  size_t capacity = 0; // bytes, rounded up
  size_t requested = 0; // bytes the caller asked for
  int device = 0; // kHost for pinned memory
  Stream* owner = nullptr; // the stream that was current at the allocation; none for pinned memory
  // Streams that must pass a point before the memory may be used again. Pinned memory: every
  // queued task that touches it. Device memory: record_stream, with the point set at the free.
  std::map<Stream*, uint64_t> users;
  AccessLog log;

  bool users_done() const;
  std::string name() const;
};

struct Counter {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;
  int64_t freed = 0;

  void add(size_t amount);
  void subtract(size_t amount);
};

struct HeapStats {
  Counter requested_bytes; // exactly what was asked for
  Counter allocated_bytes; // rounded up to the allocator's granularity
  Counter reserved_bytes; // with the cache
  Counter blocks;
  int64_t retries = 0;
  int64_t out_of_memory = 0;

  void reset_peaks();
  void reset_totals();
};

class Memory;

// The memory of one device, or the pinned memory of the host. Guarded by the machine's lock.
class Heap {
 public:
  static constexpr int kHost = -1;

  Heap(Memory& memory, int device) : memory_(memory), device_(device) {}

  // May let go of the lock for a while to wait for memory. Throws c10::OutOfMemoryError.
  Block* allocate(std::unique_lock<std::mutex>& lock, size_t bytes, Stream* owner);
  void free(Block* block);
  // Returns cached memory to the system, after a wait for the streams that may still use it.
  void empty_cache(std::unique_lock<std::mutex>& lock);

  HeapStats stats;
  size_t limit_bytes;

 private:
  Block* take_cached(size_t capacity, Stream* owner);
  Block* reserve(size_t capacity);
  void reclaim();
  [[noreturn]] void out_of_memory(size_t bytes);

  Memory& memory_;
  int device_;
  // Blocks free to be used in the order of their owner's stream; pinned ones have no owner.
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> cached_;
  std::vector<Block*> pending_; // freed, but not yet passed by their users
};

// All heaps, and the way from an address to its block. Guarded by the machine's lock.
class Memory {
 public:
  explicit Memory(Checker& checker) : checker_(checker), host_(*this, Heap::kHost) {}

  void start(int device_count);

  Heap& heap(int device) {
    return device == Heap::kHost ? host_ : *devices_.at(static_cast<size_t>(device));
  }
  // The block that holds `address`, or null.
  Block* find(uintptr_t address);
  Block* find(const void* address) {
    return find(reinterpret_cast<uintptr_t>(address));
  }

  bool poison = true; // fill memory nobody may read with NaNs

 private:
  friend class Heap;

  Checker& checker_;
  Heap host_;
  std::vector<std::unique_ptr<Heap>> devices_;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_; // by first address
  uint64_t serial_ = 0;
};

// NaN in every floating type, -1 in the integers: an index out of poison raises.
constexpr int kPoisonByte = 0xFF;

} // namespace fakeacc

#include "memory.h"

#include "host_wait.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fakeacc {

namespace {

constexpr size_t kGranularityBytes = 512;
constexpr size_t kAlignmentBytes = 64; // what vectorised CPU kernels like best
constexpr size_t kDefaultLimitBytes = size_t{16} << 30;

size_t round_up(size_t bytes) {
  return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

} // namespace

bool Block::users_done() const {
  return std::ranges::all_of(
      users, [](const auto& user) { return user.first->done() >= user.second; });
}

std::string Block::name() const {
  const auto number = " block " + std::to_string(serial);
  return device == Heap::kHost ? "pinned" + number
                               : "fakeacc:" + std::to_string(device) + number;
}

void Counter::add(size_t amount) {
  current += static_cast<int64_t>(amount);
  allocated += static_cast<int64_t>(amount);
  peak = std::max(peak, current);
}

void Counter::subtract(size_t amount) {
  current -= static_cast<int64_t>(amount);
  freed += static_cast<int64_t>(amount);
}

void HeapStats::reset_peaks() {
  for (Counter* counter : {&requested_bytes, &allocated_bytes, &reserved_bytes, &blocks}) {
    counter->peak = counter->current;
  }
}

void HeapStats::reset_totals() {
  for (Counter* counter : {&requested_bytes, &allocated_bytes, &reserved_bytes, &blocks}) {
    counter->allocated = 0;
    counter->freed = 0;
  }
  retries = 0;
  out_of_memory = 0;
}

void Memory::start(int device_count) {
  for (int device = 0; device < device_count; ++device) {
    devices_.push_back(std::make_unique<Heap>(*this, device));
    devices_.back()->limit_bytes = kDefaultLimitBytes;
  }
  host_.limit_bytes = SIZE_MAX;
}

Block* Memory::find(uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) {
    return nullptr;
  }
  const auto& [begin, block] = *std::prev(next);
  return address < begin + block->capacity ? block.get() : nullptr;
}

Block* Heap::allocate(std::unique_lock<std::mutex>& lock, size_t bytes, Stream* owner) {
  const size_t capacity = round_up(bytes);
  reclaim();
  Block* block = take_cached(capacity, owner);
  if (block == nullptr) {
    if (static_cast<size_t>(stats.reserved_bytes.current) + capacity > limit_bytes) {
      ++stats.retries;
      empty_cache(lock);
    }
    if (static_cast<size_t>(stats.reserved_bytes.current) + capacity > limit_bytes) {
      out_of_memory(bytes);
    }
    block = reserve(capacity);
  }
  block->owner = owner;
  block->requested = bytes;
  block->users.clear();
  block->log.clear();
  if (owner != nullptr) {
    // Another stream that uses the block must wait for its owner first: the allocator may have
    // handed out memory that earlier tasks of the owner still use. Whether it did depends on the
    // state of the cache; the report should not.
    const Access whole{reinterpret_cast<uintptr_t>(block->data), capacity, true};
    block->log.push_back({whole, {"the allocation", owner->name(), owner->slot, owner->pushed}});
  }
  stats.requested_bytes.add(bytes);
  stats.allocated_bytes.add(capacity);
  stats.blocks.add(1);
  return block;
}

Block* Heap::take_cached(size_t capacity, Stream* owner) {
  // Only an exact fit is reused. Then what a program may allocate under a limit follows from its
  // own allocations and frees, and from no history of the cache.
  auto found = cached_.find({owner, capacity});
  if (found == cached_.end() || found->second.empty()) {
    return nullptr;
  }
  Block* block = found->second.back();
  found->second.pop_back();
  if (memory_.poison && owner == nullptr) {
    std::memset(block->data, kPoisonByte, capacity); // pinned: no task uses it any more
  }
  return block;
}

Block* Heap::reserve(size_t capacity) {
  void* data = nullptr;
  TORCH_CHECK(
      posix_memalign(&data, kAlignmentBytes, capacity) == 0,
      "fakeacc: the host cannot give ", capacity, " bytes");
  if (memory_.poison) {
    std::memset(data, kPoisonByte, capacity);
  }
  auto block = std::make_unique<Block>();
  block->serial = ++memory_.serial_;
  block->data = static_cast<std::byte*>(data);
  block->capacity = capacity;
  block->device = device_;
  stats.reserved_bytes.add(capacity);
  auto* handle = block.get();
  memory_.blocks_.emplace(reinterpret_cast<uintptr_t>(data), std::move(block));
  return handle;
}

void Heap::free(Block* block) {
  stats.requested_bytes.subtract(block->requested);
  stats.allocated_bytes.subtract(block->capacity);
  stats.blocks.subtract(1);
  if (block->owner != nullptr) {
    // From here on the owner may overwrite the block in its own order, so everything done to it
    // must come before: by a wait of the owner, or by record_stream, for which the block waits.
    VectorClock before = block->owner->clock;
    before.join(memory_.checker_.host);
    for (auto& [stream, entry] : block->users) {
      entry = stream->pushed;
      before.join(stream->clock);
    }
    if (memory_.checker_.mode != CheckerMode::off) {
      const Access whole{reinterpret_cast<uintptr_t>(block->data), block->capacity, true};
      const Actor actor{"the free", block->owner->name(), block->owner->slot, 0};
      // A free may run in a destructor: it reports and never throws.
      memory_.checker_.check(block->log, whole, actor, before, block->name());
    }
  }
  pending_.push_back(block);
  reclaim();
}

void Heap::reclaim() {
  std::erase_if(pending_, [this](Block* block) {
    if (!block->users_done()) {
      return false;
    }
    if (memory_.poison && block->owner != nullptr) {
      // In stream order: tasks queued before the free may still read the block.
      auto* data = block->data;
      const auto bytes = block->capacity;
      block->owner->push({"poison", {}, [data, bytes] { std::memset(data, kPoisonByte, bytes); }});
    }
    cached_[{block->owner, block->capacity}].push_back(block);
    return true;
  });
}

void Heap::empty_cache(std::unique_lock<std::mutex>& lock) {
  // The blocks leave the lists before the wait. Else another thread could be given one of them
  // and queue a task for it while it is on its way back to the system.
  std::vector<Block*> released = std::exchange(pending_, {});
  for (auto& [key, blocks] : cached_) {
    released.insert(released.end(), blocks.begin(), blocks.end());
  }
  cached_.clear();
  std::map<Stream*, uint64_t> waits;
  for (Block* block : released) {
    for (auto [stream, entry] : block->users) {
      waits[stream] = std::max(waits[stream], entry);
    }
    if (block->owner != nullptr) {
      waits[block->owner] = block->owner->pushed;
    }
    stats.reserved_bytes.subtract(block->capacity);
  }
  lock.unlock();
  for (auto [stream, entry] : waits) {
    wait_on_host(*stream, entry);
  }
  lock.lock();
  for (Block* block : released) {
    auto* data = block->data;
    memory_.blocks_.erase(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }
}

void Heap::out_of_memory(size_t bytes) {
  ++stats.out_of_memory;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false,
      "fakeacc:", device_, " out of memory. Tried to allocate ", bytes, " bytes; of the limit of ",
      limit_bytes, " bytes, ", stats.allocated_bytes.current, " bytes are allocated.");
}

} // namespace fakeacc

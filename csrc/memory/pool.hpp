// Pool: equal-sized slots in size classes, leased one at a time.
//
// A class grows by slabs, each one block of the allocator. A slot goes back to its class only when
// nobody can write to it any more: its lease is released or destroyed, and every I/O in flight that
// took a hold() has dropped it.
// Knows the allocator; never knows tensors, stores or when it is wise to grow. Pool is thread-safe;
// one Lease belongs to one thread at a time. Growing does not hold the lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/allocator.hpp"

namespace memascend {

class Pool;

/// The exclusive right to a slot. Whoever can still see the bytes through it keeps them mapped; the
/// slot itself is given up by release() or destruction.
class Lease {
 public:
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  /// Throws std::invalid_argument once released: the bytes may be another lease's.
  std::byte* address() const;
  std::uint64_t nbytes() const noexcept { return nbytes_; }  // as asked
  std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  const std::string& class_name() const noexcept { return class_name_; }
  bool released() const noexcept { return hold_ == nullptr; }
  /// Gives the slot up; again is harmless.
  void release() noexcept { hold_.reset(); }
  /// A share in the slot, for an I/O in flight. Throws std::invalid_argument once released.
  std::shared_ptr<void> hold() const;

 private:
  friend class Pool;
  Lease() = default;

  std::shared_ptr<Pool> pool_;  // keeps the memory mapped after release
  std::shared_ptr<void> hold_;
  std::byte* address_ = nullptr;
  std::uint64_t nbytes_ = 0;
  std::uint64_t slot_bytes_ = 0;
  std::string class_name_;
};

struct ClassStats {
  std::string name;
  std::uint64_t slot_bytes = 0;
  std::uint64_t slot_count = 0;
  std::uint64_t leased_count = 0;
  std::uint64_t leased_count_peak = 0;
};

/// Why acquire() gave nothing. `class_name` is empty when no class is large enough.
struct Exhaustion {
  std::uint64_t requested_bytes = 0;
  std::string class_name;
  std::uint64_t slot_bytes = 0;
  std::uint64_t slot_count = 0;
  std::uint64_t leased_count = 0;
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static std::shared_ptr<Pool> create(std::shared_ptr<Allocator> allocator, std::string component);

  /// Adds a class; its slots have `slot_bytes` rounded up to a page. Name and size must be new.
  void add_class(const std::string& name, std::uint64_t slot_bytes, std::uint64_t slot_count);
  /// Adds one slab of `count` slots to a class. Throws HostMemoryError when the allocator does.
  void add_slots(const std::string& name, std::uint64_t count);

  /// A slot of the smallest class that holds `nbytes`; of the next larger one with a free slot when
  /// `allow_larger`. Null when there is none: exhaustion() says why.
  std::unique_ptr<Lease> acquire(std::uint64_t nbytes, bool allow_larger);
  Exhaustion exhaustion(std::uint64_t nbytes) const;

  /// Smallest slots first.
  std::vector<ClassStats> classes() const;
  bool is_valid() const;

 private:
  struct SizeClass {
    ClassStats stats;
    std::vector<std::unique_ptr<Block>> slabs;
    std::vector<std::byte*> slots;          // by slot index
    std::vector<bool> leased;               // by slot index
    std::vector<std::uint32_t> free_slots;  // the last given back is taken first: still in cache
  };
  struct SlotHold;

  Pool(std::shared_ptr<Allocator> allocator, std::string component);
  SizeClass& find(const std::string& name);
  void give_back(SizeClass& size_class, std::uint32_t slot) noexcept;
  bool is_valid_locked() const;

  mutable std::mutex mutex_;
  std::shared_ptr<Allocator> allocator_;
  std::string component_;
  std::map<std::uint64_t, SizeClass> classes_;  // by slot_bytes; classes are never removed
};

}  // namespace memascend

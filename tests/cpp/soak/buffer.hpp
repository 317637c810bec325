// Buffers: the memory of one transfer, a block or the heap, with what must not be touched around
// it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "memory/allocator.hpp"
#include "nvme/store.hpp"
#include "tally.hpp"

namespace memascend::soak {

using Random = std::mt19937_64;

/// From 0 to `end` - 1.
inline std::size_t below(Random& random, std::size_t end) { return random() % end; }
inline bool one_in(Random& random, std::size_t count) { return below(random, count) == 0; }

/// Blocks that somebody may still write to. One allocated while it is here was given out twice.
class LentBlocks {
 public:
  void claim(const std::byte* address, std::uint64_t nbytes);
  void drop(const std::byte* address);
  std::size_t count();

 private:
  std::mutex mutex_;
  std::map<const std::byte*, std::uint64_t> live_;
};

void fill(std::span<std::byte> memory, Random& random);

/// Memory of one transfer; hands its owner on to the store, and may then be dropped at once.
class Buffer {
 public:
  /// A block where the limit allows one, else the heap; often at an odd address.
  static Buffer take(Allocator& allocator, LentBlocks& lent, std::uint64_t nbytes, Random& random,
                     Tally& tally);
  /// Lies in memory that the caller keeps until the transfer is over.
  static Buffer borrow(std::byte* data, std::uint64_t nbytes);

  std::span<std::byte> bytes() { return {data_, nbytes_}; }
  Store::Memory memory() { return {data_, capacity_bytes_, hold_}; }
  bool is_borrowed() const { return hold_ == nullptr; }
  /// Nothing but the capacity was written to.
  void check_canaries() const;

 private:
  Buffer() = default;
  void lay_in_block(const Block& block, Random& random);
  void lay_on_heap(Random& random);

  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
  std::uint64_t capacity_bytes_ = 0;
  std::shared_ptr<void> hold_;
  std::span<std::byte> before_;
  std::span<std::byte> after_;
};

}  // namespace memascend::soak

// Allocator: variable-size, page-granular blocks from one arena. Best fit, merging on free, no
// rounding to powers of two.
//
// Guarantee: whenever the allocator takes more memory from the system, it then holds at most the
// bytes requested by live blocks, plus one page per live block, plus the tail of the last piece
// (less than 2 MiB). To keep this it gives the memory of free holes back to the system before it
// grows, since a hole's addresses can be committed again for a later block. The guarantee does not
// hold for explicit huge pages, which cannot be given back in part, and for memory registered with
// a device. Such memory comes in pieces. A piece is given back as a whole, once nothing in it is in
// use, and only on trim() or if memory would be refused otherwise, since registering is slow. If
// that is not enough, the holes in other pieces are given back and the rest of these pieces is
// registered again.
//
// Knows nothing of slots, tensors or devices. Thread-safe; growing holds the lock. Freeing never
// waits for it: a registrar may need a lock of the freeing thread (Python's), or may free blocks
// itself. A block that cannot be freed at once is freed by the thread that has the lock.
//
// Belongs to the process that made it: in a forked child every call throws std::invalid_argument,
// and freeing blocks, or dropping the child's copy, does nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/free_space.hpp"
#include "memory/arena.hpp"
#include "system/owner_process.hpp"

namespace memascend {

class Allocator;

/// A live block: exclusive bytes of the arena, freed on destruction. Keeps the arena mapped.
class Block {
 public:
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* address() const noexcept { return address_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }  // as requested
  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  const std::string& component() const noexcept { return component_; }

 private:
  friend class Allocator;
  Block() = default;

  std::shared_ptr<Allocator> allocator_;
  std::byte* address_ = nullptr;
  std::uint64_t nbytes_ = 0;
  std::uint64_t capacity_bytes_ = 0;
  std::string component_;
};

struct AllocatorOptions {
  ArenaOptions arena;
  std::uint64_t limit_bytes = 0;  // maximum of memory held; 0: no limit
};

struct AllocatorStats {
  std::uint64_t requested_bytes = 0;   // sum over live blocks, as requested
  std::uint64_t used_bytes = 0;        // the same, in whole pages
  std::uint64_t reserved_bytes = 0;    // memory held
  std::uint64_t registered_bytes = 0;  // the registered part of it
  std::uint64_t peak_used_bytes = 0;
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t block_count = 0;
};

struct ComponentStats {
  std::uint64_t live_bytes = 0;  // as requested
  std::uint64_t peak_bytes = 0;
  std::uint64_t block_count = 0;
};

class Allocator : public std::enable_shared_from_this<Allocator> {
 public:
  static std::shared_ptr<Allocator> create(const AllocatorOptions& options);

  /// A block of at least `nbytes` (> 0), accounted to `component`. Its content is arbitrary unless
  /// `zero`. Throws HostMemoryError beyond the limit or beyond the system's memory.
  std::unique_ptr<Block> allocate(std::uint64_t nbytes, const std::string& component, bool zero);
  /// Gives all free memory back to the system, as far as possible.
  void trim();

  ArenaReport report();
  std::vector<std::string> notes() const;
  AllocatorStats stats();
  std::map<std::string, ComponentStats> components();
  /// Returns whether an address is inside a live block.
  bool contains(std::uintptr_t address);
  /// Returns whether free and used bytes tile the range and all counts agree. For tests.
  bool is_valid();

 private:
  friend class Block;
  class Lock;
  struct Used {
    std::uint64_t nbytes;
    std::uint64_t capacity_bytes;
    ComponentStats* component;
  };

  explicit Allocator(const AllocatorOptions& options);
  void expect_owner() const;
  void free(const Block& block) noexcept;
  void free_late() noexcept;
  void free_locked(std::uint64_t offset) noexcept;
  struct Place {
    std::uint64_t offset;
    bool fresh;  // new from the system, so all zero
  };
  Place grow(std::uint64_t capacity_bytes, const std::string& component);
  Place grow_registered(std::uint64_t capacity_bytes, const std::string& component);
  Place add_piece(std::uint64_t capacity_bytes, const std::string& component);
  std::uint64_t within_limit(std::uint64_t begin, std::uint64_t end_min, std::uint64_t end,
                             const std::string& component) const;
  void commit(std::uint64_t begin, std::uint64_t end);
  void drop_surplus(std::uint64_t end, std::uint64_t run_end);
  void decommit_free(std::uint64_t begin, std::uint64_t end,
                     Arena::Pieces pieces = Arena::Pieces::kWhole);
  [[noreturn]] void throw_limit(std::uint64_t needed_bytes, const std::string& component) const;
  bool is_valid_locked() const;
  bool are_pieces_valid() const;

  const OwnerProcess owner_;
  mutable std::mutex mutex_;
  std::uint64_t limit_bytes_;
  Arena arena_;
  FreeSpace free_;
  std::map<std::uint64_t, Used> used_;  // by offset
  std::map<std::string, ComponentStats> components_;
  AllocatorStats stats_;
  std::atomic<std::thread::id> holder_;  // the holder of mutex_, so that free() can recognise it
  std::mutex late_mutex_;                // always locked last, and never during a call
  std::vector<std::uint64_t> late_;      // offsets of blocks still to be freed
};

}  // namespace memascend

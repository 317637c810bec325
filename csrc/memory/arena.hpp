// Arena: one reserved address range that gets its memory piece by piece.
//
// Addresses are contiguous over all pieces, so a block may lie across two of them and no tail is
// lost in between. With device registration each commit is a piece of its own, registered whole. A
// block must lie within one (a device refuses a copy over two registrations), and a piece goes back
// whole. What could not be registered is tried again with every later commit.
// Knows pages and a registrar; never knows which bytes are in use. Not thread-safe: the allocator
// that owns it holds a lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "system/host_registrar.hpp"
#include "system/pages.hpp"

namespace memascend {

struct ArenaOptions {
  PageOptions pages;
  bool register_device = false;
  std::shared_ptr<HostRegistrar> registrar;  // null: CUDA's driver
  std::uint64_t range_bytes = 0;  // addresses to reserve; 0: a multiple of physical memory
  std::string cuda_library = "libcuda.so.1";
};

/// What was really obtained, measured from the kernel.
struct ArenaReport {
  std::uint64_t reserved_bytes = 0;  // with memory behind them
  std::uint64_t resident_bytes = 0;
  std::uint64_t huge_page_bytes = 0;
  std::uint64_t locked_bytes = 0;  // by mlock; registered bytes are pinned by the driver too
  std::uint64_t registered_bytes = 0;
  bool wants_registration = false;  // then all that is reserved should be registered
  int numa_node = -1;               // where the first page lies, -1: unknown
  std::vector<std::string> notes;   // what is missing and how to get it
};

class Arena {
 public:
  explicit Arena(const ArenaOptions& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* base() const noexcept { return range_.base(); }
  std::uint64_t range_bytes() const noexcept { return range_.nbytes(); }
  std::uint64_t reserved_bytes() const noexcept { return reserved_bytes_; }
  std::uint64_t registered_bytes() const noexcept { return registered_bytes_; }
  /// Whether memory was to be registered with a device, whatever came of it.
  bool wants_registration() const noexcept { return options_.register_device; }
  /// Whether there is anybody to register it. Then each commit is a piece of its own.
  bool registers() const noexcept { return registrar_ != nullptr; }
  struct CommittedPiece {
    std::uint64_t nbytes;
    bool registered;  // false: refused until now
  };
  /// By offset; empty unless registers().
  const std::map<std::uint64_t, CommittedPiece>& pieces() const noexcept { return pieces_; }
  /// Whether a piece begins or ends at `offset`.
  bool is_boundary(std::uint64_t offset) const;

  /// Puts zeroed memory behind [offset, offset + nbytes), which has none. Both page multiples.
  /// Throws HostMemoryError, and then nothing has changed.
  void commit(std::uint64_t offset, std::uint64_t nbytes);
  enum class Pieces { kWhole, kCut };
  /// Gives the memory behind the range back. False when it must stay: not exactly one piece when
  /// registers(), made of explicit huge pages (which cannot be given back in part), or refused by
  /// the driver or the kernel, with a note. Then it is what it was. With kCut a part of a piece
  /// goes back too, and what is left of it is registered anew: that takes time. Pre: the range is
  /// in one piece.
  bool decommit(std::uint64_t offset, std::uint64_t nbytes, Pieces pieces = Pieces::kWhole);
  /// As decommit, for bytes that were never counted as committed but that a huge page may have
  /// brought along behind a neighbour.
  void drop_surplus(std::uint64_t offset, std::uint64_t nbytes);

  ArenaReport report();
  const std::vector<std::string>& notes() const noexcept { return notes_.list(); }

 private:
  std::span<std::byte> memory(std::uint64_t offset, std::uint64_t nbytes) const {
    return {range_.base() + offset, nbytes};
  }
  bool is_hugetlb(std::uint64_t offset, std::uint64_t nbytes) const;
  bool register_piece(std::uint64_t offset, CommittedPiece& piece);
  void register_missing(std::uint64_t newest);
  void add_piece(std::uint64_t offset, std::uint64_t end);
  bool unregister_piece(std::uint64_t offset, CommittedPiece& piece);

  ArenaOptions options_;
  Notes notes_;
  AddressRange range_;
  std::shared_ptr<HostRegistrar> registrar_;
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t registered_bytes_ = 0;
  std::map<std::uint64_t, CommittedPiece> pieces_;
  std::map<std::uint64_t, std::uint64_t> hugetlb_;  // offset -> nbytes
};

}  // namespace memascend

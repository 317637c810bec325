// Arena: one reserved address range, to which memory is committed in pieces.
//
// Addresses are contiguous over all pieces, so a block may span two of them and no tail is wasted
// in between. With device registration each commit is a piece of its own, registered as a whole. A
// block must then be within one (a device refuses a copy over two registrations), and a piece is
// given back as a whole. A refused registration is retried with every later commit. Knows pages and
// a registrar; never knows which bytes are in use. Not thread-safe: the allocator that owns it
// holds a lock.
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

/// The memory obtained, as measured from the kernel.
struct ArenaReport {
  std::uint64_t reserved_bytes = 0;  // with memory behind them
  std::uint64_t resident_bytes = 0;
  std::uint64_t huge_page_bytes = 0;
  std::uint64_t locked_bytes = 0;  // by mlock; registered bytes are pinned by the driver too
  std::uint64_t registered_bytes = 0;
  bool wants_registration = false;  // if so, all reserved bytes should be registered
  int numa_node = -1;               // node of the first page, -1: unknown
  std::vector<std::string> notes;   // missing features and their remedies
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
  /// Returns whether registration with a device was requested, even if it failed.
  bool wants_registration() const noexcept { return options_.register_device; }
  /// Returns whether there is a registrar. If so, each commit is a piece of its own.
  bool registers() const noexcept { return registrar_ != nullptr; }
  struct CommittedPiece {
    std::uint64_t nbytes;
    bool registered;  // false: refused until now
  };
  /// By offset; empty unless registers().
  const std::map<std::uint64_t, CommittedPiece>& pieces() const noexcept { return pieces_; }
  /// Returns whether a piece begins or ends at `offset`.
  bool is_boundary(std::uint64_t offset) const;

  /// Commits zeroed memory to [offset, offset + nbytes), which has none. Both page multiples.
  /// Throws HostMemoryError; then nothing has changed.
  void commit(std::uint64_t offset, std::uint64_t nbytes);
  enum class Pieces { kWhole, kCut };
  /// Gives the memory of the range back to the system. False, with no change, if it must stay: not
  /// exactly one piece when registers(), made of explicit huge pages (which cannot be given back in
  /// part), or refused by the driver or the kernel, with a note. With kCut a part of a piece may be
  /// given back too, and the rest of it is registered again, which is slow. Pre: the range is in
  /// one piece.
  bool decommit(std::uint64_t offset, std::uint64_t nbytes, Pieces pieces = Pieces::kWhole);
  /// As decommit, for bytes that were never counted as committed but that a huge page of a
  /// neighbour may have backed.
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

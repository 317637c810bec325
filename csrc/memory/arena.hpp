// Arena: one reserved address range that gets its memory piece by piece.
//
// Addresses are contiguous over all pieces, so a block may lie across two of them and no tail is
// lost in between. With device registration a block must lie within one piece (the driver refuses
// a copy over two registrations): is_boundary() tells where pieces meet.
// Knows pages and the driver; never knows which bytes are in use. Not thread-safe: the allocator
// that owns it holds a lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "os/cuda_driver.hpp"
#include "os/pages.hpp"

namespace memascend {

struct ArenaOptions {
  PageOptions pages;
  bool register_device = false;
  std::uint64_t range_bytes = 0;  // addresses to reserve; 0: a multiple of physical memory
  std::string cuda_library = "libcuda.so.1";
  std::uint64_t registration_bytes_max = kRegistrationBytesMax;
};

/// What was really obtained, measured from the kernel.
struct ArenaReport {
  std::uint64_t reserved_bytes = 0;  // with memory behind them
  std::uint64_t resident_bytes = 0;
  std::uint64_t huge_page_bytes = 0;
  std::uint64_t locked_bytes = 0;  // by mlock; registered bytes are pinned by the driver too
  std::uint64_t registered_bytes = 0;
  int numa_node = -1;              // where the first page lies, -1: unknown
  std::vector<std::string> notes;  // what is missing and how to get it
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
  /// Whether pieces are registered with a device. Then each commit is a piece of its own, and
  /// decommit refuses.
  bool registers() const noexcept { return driver_ != nullptr; }
  /// Whether two pieces that no block may straddle meet at `offset`.
  bool is_boundary(std::uint64_t offset) const { return boundaries_.contains(offset); }

  /// Puts zeroed memory behind [offset, offset + nbytes), which has none. Both page multiples.
  /// Throws HostMemoryError, and then nothing has changed.
  void commit(std::uint64_t offset, std::uint64_t nbytes);
  /// Gives the memory behind the range back. False when it must stay: registered with a device,
  /// made of explicit huge pages (which cannot be given back in part), or refused by the kernel.
  bool decommit(std::uint64_t offset, std::uint64_t nbytes);
  /// As decommit, for bytes that were never counted as committed but that a huge page may have
  /// brought along behind a neighbour.
  void drop_surplus(std::uint64_t offset, std::uint64_t nbytes);

  ArenaReport report();
  const std::vector<std::string>& notes() const noexcept { return notes_.list(); }

 private:
  std::span<std::byte> piece(std::uint64_t offset, std::uint64_t nbytes) const {
    return {range_.base() + offset, nbytes};
  }
  bool is_hugetlb(std::uint64_t offset, std::uint64_t nbytes) const;

  ArenaOptions options_;
  Notes notes_;
  AddressRange range_;
  std::unique_ptr<CudaDriver> driver_;
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t registered_bytes_ = 0;
  std::map<std::uint64_t, std::uint64_t> registered_;  // offset -> nbytes
  std::map<std::uint64_t, std::uint64_t> hugetlb_;     // offset -> nbytes
  std::set<std::uint64_t> boundaries_;
};

}  // namespace memascend

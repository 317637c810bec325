// Pages: address ranges and the physical memory behind them, straight from the kernel.
//
// Contains mmap, huge pages, NUMA preference, prefault, mlock, and measuring the result. Never
// knows blocks, pools or devices. Functions are thread-safe on disjoint pieces; Notes and
// AddressRange belong to one owner.
//
// Two kinds of failure. Running out of memory or addresses throws HostMemoryError. Features that
// only improve memory (huge pages, a node, a page lock) are best effort: without one the function
// continues and adds one note on the missing feature, the reason, and the remedy.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "system/owner_process.hpp"

namespace memascend {

inline constexpr std::uint64_t kPageBytes = 4096;
inline constexpr std::uint64_t kHugePageBytes = 2 * 1024 * 1024;

/// Host memory is not available. `limit_bytes` is 0 if the system refused, not a limit of ours.
class HostMemoryError : public std::runtime_error {
 public:
  HostMemoryError(const std::string& what, std::uint64_t asked, std::uint64_t reserved,
                  std::uint64_t limit)
      : std::runtime_error(what),
        requested_bytes(asked),
        reserved_bytes(reserved),
        limit_bytes(limit) {}
  std::uint64_t requested_bytes;
  std::uint64_t reserved_bytes;
  std::uint64_t limit_bytes;
};

/// Throws unless the system's page size is kPageBytes. With larger pages (arm64 kernels may have 16
/// or 64 KiB) giving a block back would also drop its neighbour's bytes on the same page.
void require_page_bytes(std::uint64_t system_page_bytes);

/// The kind of huge pages to request. kAuto takes explicit ones if enough are free and the kernel
/// can populate them without the risk of SIGBUS (from Linux 5.14 on), else transparent ones.
enum class HugePages { kAuto, kExplicit, kTransparent, kOff };

struct PageOptions {
  HugePages huge_pages = HugePages::kAuto;
  bool lock = true;
  int numa_node = -1;             // -1: the kernel chooses
  unsigned prefault_threads = 0;  // 0: one per core, at most kPrefaultThreadsMax
  /// The remaining time, over all pieces, for turning small pages into huge ones: on fragmented
  /// memory the kernel moves other pages out of the way for each.
  std::chrono::milliseconds collapse_time = std::chrono::seconds(5);
};

inline constexpr unsigned kPrefaultThreadsMax = 4;
/// Bytes that one call asks the kernel to turn into huge pages.
inline constexpr std::uint64_t kCollapseBytes = 32 * kHugePageBytes;

/// Notes on missing features, each once, in the order they were noticed.
class Notes {
 public:
  void add(std::string note);
  const std::vector<std::string>& list() const noexcept { return notes_; }

 private:
  std::vector<std::string> notes_;
};

/// A range of addresses, 2 MiB aligned, without memory until back_pages() is called on pieces of
/// it. Unmapped on destruction, but only by the process that made it: a forked child does not
/// inherit the pieces, and may have mapped other memory at these addresses.
class AddressRange {
 public:
  /// Halves `nbytes` until the kernel accepts, down to `nbytes_min`; then throws.
  AddressRange(std::uint64_t nbytes, std::uint64_t nbytes_min);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  std::byte* base() const noexcept { return base_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  const OwnerProcess& owner() const noexcept { return owner_; }

 private:
  std::byte* mapping_ = nullptr;  // base_ less the guard before it
  std::uint64_t mapping_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::uint64_t nbytes_ = 0;
  const OwnerProcess owner_;
};

enum class Backing { kPages, kHugetlb };

/// Commits zeroed, writable, resident memory to a page-aligned piece of an AddressRange that has
/// none. Throws HostMemoryError if the memory is not available; the piece is then without memory.
/// Subtracts the time used from `options.collapse_time`.
Backing back_pages(std::span<std::byte> piece, PageOptions& options, Notes& notes);

/// Page-locks a piece. False, with a note, if the system refuses.
bool lock_pages(std::span<std::byte> piece, Notes& notes);

/// Gives the memory of a piece back to the system; the addresses stay reserved and would read as
/// zero. Unlocks it first. Not for Backing::kHugetlb. False, with a note, if the kernel refuses:
/// the piece then still has its memory.
bool discard_pages(std::span<std::byte> piece, Notes& notes);

/// Pages of a range, as the kernel counts them.
struct PageUsage {
  std::uint64_t resident_bytes = 0;
  std::uint64_t huge_page_bytes = 0;  // transparent and explicit
  std::uint64_t locked_bytes = 0;
};

/// Reads /proc/self/smaps. All zero, with a note, if that file is missing.
PageUsage measure_pages(std::span<const std::byte> range, Notes& notes);

/// The NUMA node of a page, -1 if unknown.
int node_of_page(const std::byte* page);

}  // namespace memascend

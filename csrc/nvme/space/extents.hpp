// Extents: which parts of one volume's file are free.
//
// Best fit by size with coalescing of neighbours; pure bookkeeping, no I/O. Knows offsets and byte
// counts; never knows keys or files. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace memascend {

/// A run of bytes on a volume.
struct Extent {
  int volume_index;
  std::uint64_t offset;
  std::uint64_t nbytes;
};

class FreeExtents {
 public:
  /// All offsets and sizes will be multiples of `alignment_bytes`, a power of two.
  FreeExtents(int volume_index, std::uint64_t alignment_bytes);

  /// Takes one run of exactly `nbytes` from the smallest free run that holds it, or nothing.
  std::optional<Extent> take(std::uint64_t nbytes);
  /// Takes `nbytes` from as many free runs as it needs, largest first, or nothing when
  /// free_bytes() is less.
  std::vector<Extent> take_scattered(std::uint64_t nbytes);
  /// Gives a run back, or brings a new one after the file has grown: it joins its free neighbours.
  /// Aborts when a part of it is free already.
  void give(const Extent& extent);

  std::uint64_t alignment_bytes() const noexcept { return alignment_bytes_; }
  std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  /// Free bytes directly before `end`: growth there extends them.
  std::uint64_t free_bytes_before(std::uint64_t end) const;
  /// Runs are aligned, apart, not empty, and agree in both orders. Linear.
  bool is_valid() const;

 private:
  void insert(std::uint64_t offset, std::uint64_t nbytes);
  void erase(std::map<std::uint64_t, std::uint64_t>::iterator run);
  Extent take_from(std::uint64_t offset, std::uint64_t nbytes);

  int volume_index_;
  std::uint64_t alignment_bytes_;
  std::uint64_t free_bytes_ = 0;
  std::map<std::uint64_t, std::uint64_t> by_offset_;             // offset -> nbytes
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_nbytes_;  // (nbytes, offset)
};

}  // namespace memascend

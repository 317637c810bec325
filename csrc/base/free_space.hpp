// FreeSpace: which bytes of a range are free, and which of those have memory behind them.
//
// Pure bookkeeping on offsets: never touches memory, never knows who uses the rest.
// Not thread-safe: the allocator that owns it holds a lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace memascend {

/// Free bytes [offset, offset + nbytes).
struct FreeRun {
  std::uint64_t offset;
  std::uint64_t nbytes;
};

class FreeSpace {
 public:
  /// All of [0, range_bytes) is free and nothing has memory behind it.
  explicit FreeSpace(std::uint64_t range_bytes);

  /// Smallest free run with memory behind all of it that holds `nbytes`; lowest offset among
  /// equals.
  std::optional<FreeRun> best_backed(std::uint64_t nbytes) const;
  /// Smallest free run, whatever is behind it, that holds `nbytes`. A linear search.
  std::optional<FreeRun> best_any(std::uint64_t nbytes) const;
  /// Smallest free run without memory behind any of it that holds `nbytes`. A linear search.
  std::optional<FreeRun> best_untouched(std::uint64_t nbytes) const;

  /// Takes free bytes out.
  void take(std::uint64_t offset, std::uint64_t nbytes);
  /// Gives bytes back; they have memory behind them. They merge with free neighbours of the same
  /// kind, but not over a boundary.
  void give(std::uint64_t offset, std::uint64_t nbytes);
  /// Records that free bytes now have memory behind them, or no longer.
  void mark(std::uint64_t offset, std::uint64_t nbytes, bool backed);
  /// No run with memory behind it will extend over `offset`. Call before the bytes around it get
  /// their memory.
  void add_boundary(std::uint64_t offset) { boundaries_.insert(offset); }
  /// Free bytes around `offset` that are alike merge. Harmless where there is no boundary.
  void remove_boundary(std::uint64_t offset);
  const std::set<std::uint64_t>& boundaries() const noexcept { return boundaries_; }

  /// Free pieces with (or without) memory behind them inside [begin, end).
  std::vector<FreeRun> pieces(std::uint64_t begin, std::uint64_t end, bool backed) const;
  std::uint64_t free_bytes() const;
  std::uint64_t backed_bytes() const noexcept { return backed_bytes_; }

  /// Every piece is non-empty, inside the range, apart from its neighbours, merged where it may be
  /// and over no boundary; the index by size and the byte count agree.
  bool is_valid() const;
  /// Whether [offset, offset + nbytes) holds no free byte.
  bool is_taken(std::uint64_t offset, std::uint64_t nbytes) const;

 private:
  struct Piece {
    std::uint64_t nbytes;
    bool backed;
  };
  using Pieces = std::map<std::uint64_t, Piece>;

  void insert(std::uint64_t offset, std::uint64_t nbytes, bool backed);
  void erase(Pieces::iterator piece);
  bool merges(Pieces::const_iterator left, Pieces::const_iterator right) const;

  std::uint64_t range_bytes_;
  Pieces pieces_;                                                     // by offset
  std::set<std::pair<std::uint64_t, std::uint64_t>> backed_by_size_;  // (nbytes, offset)
  std::set<std::uint64_t> boundaries_;
  std::uint64_t backed_bytes_ = 0;
};

}  // namespace memascend

// FreeSpace: which bytes of a range are free, and which of those are backed: have memory behind
// them in an arena, or lie in a volume's file as it has grown so far.
//
// Pure bookkeeping on offsets: never touches memory or files, never knows who uses the rest.
// Not thread-safe: whoever owns it holds a lock.
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
  /// All of [0, range_bytes) is free and nothing is backed.
  explicit FreeSpace(std::uint64_t range_bytes);

  /// Smallest free run, all of it backed, that holds `nbytes`; lowest offset among equals.
  std::optional<FreeRun> best_backed(std::uint64_t nbytes) const;
  /// Largest free run that is backed; none when nothing is.
  std::optional<FreeRun> largest_backed() const;
  /// Smallest free run, backed or not, that holds `nbytes`. A linear search.
  std::optional<FreeRun> best_any(std::uint64_t nbytes) const;
  /// Smallest free run of which nothing is backed that holds `nbytes`. A linear search.
  std::optional<FreeRun> best_untouched(std::uint64_t nbytes) const;

  /// Takes free bytes out.
  void take(std::uint64_t offset, std::uint64_t nbytes);
  /// Gives bytes back; they are backed. They merge with free neighbours that are alike, but not
  /// over a boundary. Aborts when a part of them is free already.
  void give(std::uint64_t offset, std::uint64_t nbytes);
  /// Records that free bytes are backed from now on, or no longer.
  void mark(std::uint64_t offset, std::uint64_t nbytes, bool backed);
  /// No backed run will extend over `offset`. Call before the bytes around it are backed.
  void add_boundary(std::uint64_t offset) { boundaries_.insert(offset); }
  /// Free bytes around `offset` that are alike merge. Harmless where there is no boundary.
  void remove_boundary(std::uint64_t offset);
  const std::set<std::uint64_t>& boundaries() const noexcept { return boundaries_; }

  /// Free pieces inside [begin, end) that are backed, or that are not.
  std::vector<FreeRun> pieces(std::uint64_t begin, std::uint64_t end, bool backed) const;
  std::uint64_t free_bytes() const;
  std::uint64_t backed_bytes() const noexcept { return backed_bytes_; }
  /// Of these, the ones directly before `end`: what is backed from there on extends them.
  std::uint64_t backed_bytes_before(std::uint64_t end) const;

  /// Every piece is non-empty, inside the range, apart from its neighbours, merged where it may be
  /// and over no boundary; the index by size and the byte count agree.
  bool is_valid() const;
  /// Whether [offset, offset + nbytes) holds no free byte.
  bool is_taken(std::uint64_t offset, std::uint64_t nbytes) const;

 private:
  struct FreePiece {
    std::uint64_t nbytes;
    bool backed;
  };
  using Pieces = std::map<std::uint64_t, FreePiece>;

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

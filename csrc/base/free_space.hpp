// FreeSpace: the free bytes of a range, and which of them are backed: by memory in an arena, or by
// the space of a volume's file. TakenRun: bytes of it that an object owns.
//
// Pure bookkeeping on offsets: never touches memory or files, never knows the users of the rest.
// Not thread-safe: its owner holds a lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
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
  /// Largest free run that is backed; nothing if there is none.
  std::optional<FreeRun> largest_backed() const;
  /// Smallest free run, backed or not, that holds `nbytes`. A linear search.
  std::optional<FreeRun> best_any(std::uint64_t nbytes) const;
  /// Smallest free run that is wholly unbacked and holds `nbytes`. A linear search.
  std::optional<FreeRun> best_untouched(std::uint64_t nbytes) const;

  /// Marks free bytes as taken.
  void take(std::uint64_t offset, std::uint64_t nbytes);
  /// Marks taken bytes as free and backed. They merge with free neighbours of the same kind, but
  /// not over a boundary. Aborts if a part of them is already free.
  void give(std::uint64_t offset, std::uint64_t nbytes);
  /// Records that free bytes are backed from now on, or no longer.
  void mark(std::uint64_t offset, std::uint64_t nbytes, bool backed);
  /// Adds a boundary over which free pieces do not merge. Call before bytes around it are backed.
  void add_boundary(std::uint64_t offset) { boundaries_.insert(offset); }
  /// Removes a boundary, and merges free bytes around it if they are of one kind. Without a
  /// boundary at `offset` it has no effect.
  void remove_boundary(std::uint64_t offset);
  const std::set<std::uint64_t>& boundaries() const noexcept { return boundaries_; }

  /// Free pieces inside [begin, end) that are backed, or that are not.
  std::vector<FreeRun> pieces(std::uint64_t begin, std::uint64_t end, bool backed) const;
  std::uint64_t free_bytes() const;
  std::uint64_t backed_bytes() const noexcept { return backed_bytes_; }
  /// The backed free bytes directly before `end`: growth from there would extend them.
  std::uint64_t backed_bytes_before(std::uint64_t end) const;

  /// Returns whether every piece is non-empty, inside the range, disjoint, merged where allowed and
  /// within boundaries, and the index by size and the byte count agree.
  bool is_valid() const;
  /// Returns whether [offset, offset + nbytes) has no free byte.
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

/// A run that was taken, and is given back by `release` or with this object.
class TakenRun {
 public:
  /// Takes bytes that must be free.
  TakenRun(std::shared_ptr<FreeSpace> space, std::uint64_t offset, std::uint64_t nbytes);
  ~TakenRun() { release(); }
  TakenRun(const TakenRun&) = delete;
  TakenRun& operator=(const TakenRun&) = delete;

  std::uint64_t offset() const noexcept { return offset_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  /// Returns whether the run is taken from this space, and not given back.
  bool is_of(const FreeSpace& space) const noexcept { return space_.get() == &space; }
  /// Gives the run back; a second call has no effect.
  void release();

 private:
  std::shared_ptr<FreeSpace> space_;  // empty after release
  std::uint64_t offset_;
  std::uint64_t nbytes_;
};

}  // namespace memascend

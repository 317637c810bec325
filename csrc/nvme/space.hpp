// Space: the store's volumes and what of them is taken; hands out extents and grows the files.
//
// Knows volumes and free extents; never knows requests or what a key is beyond its name in a
// message. Not thread-safe, but volumes() may be read on any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nvme/extents.hpp"
#include "os/volume.hpp"

namespace memascend {

class Space {
 public:
  /// Pre: at least one volume. Files grow by `grow_bytes`, or by what is needed where that is more.
  Space(std::vector<Volume> volumes, std::uint64_t grow_bytes);

  /// Takes room for `nbytes`, all on the volume with the most of it; in one piece where the volume
  /// is not fragmented and full. Throws StoreFullError, with nothing changed, when no volume has
  /// it.
  std::vector<Extent> take(const std::string& key, std::uint64_t nbytes);
  void give(const std::vector<Extent>& extents);

  /// Closes the files; nothing else may be called afterwards.
  void close() { volumes_.clear(); }

  const std::vector<Volume>& volumes() const noexcept { return volumes_; }
  /// What direct I/O asks on every volume: the strictest of each rule.
  Alignment alignment() const noexcept { return alignment_; }
  /// Bytes of the volumes' files, and those of them not taken.
  std::uint64_t reserved_bytes() const;
  std::uint64_t free_bytes() const;
  /// Bytes that may still be taken: free ones and what the file systems would give.
  std::uint64_t available_bytes() const;

 private:
  std::uint64_t available_bytes(std::size_t index) const;
  bool grow(std::size_t index, std::uint64_t nbytes);

  std::vector<Volume> volumes_;
  std::vector<FreeExtents> free_;  // of the volume with the same index
  std::uint64_t grow_bytes_;
  Alignment alignment_{1, 1};
};

}  // namespace memascend

// Space: the store's volumes and what of them is taken; hands out extents and grows the files.
//
// With several volumes a key is cut into stripes (nvme/stripes.hpp), a small one lies whole on the
// volume that has least to do. Knows volumes and their free space; never knows requests or what a
// key is beyond its name in a message. Not thread-safe, but volumes() may be read on any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/free_space.hpp"
#include "nvme/engine/errors.hpp"
#include "nvme/space/checksums.hpp"
#include "nvme/space/extents.hpp"
#include "nvme/space/stripes.hpp"
#include "system/volume.hpp"

namespace memascend {

struct SpaceOptions {
  std::uint64_t grow_bytes = std::uint64_t{256} << 20;  // steps of the volumes' files
  std::uint64_t stripe_bytes = std::uint64_t{1} << 20;  // with several volumes
  std::vector<double> weights;                          // of the volumes; empty: all alike
  Checksums* checksums = nullptr;  // notified of what is taken; outlives the space
};

class Space {
 public:
  /// Pre: at least one volume. Files grow by `grow_bytes`, or by what is needed where that is more.
  /// Throws std::invalid_argument for weights that are not positive or not one for each volume.
  Space(std::vector<Volume> volumes, const SpaceOptions& options);

  /// Takes room for `nbytes`; the extents' order is that of the key's bytes. On one volume in one
  /// piece where it is not fragmented and full. On several in stripes, in proportion to their
  /// weights; what one has no room for goes to the others. Throws StoreFullError, with nothing
  /// taken, when all together do not have it, and what the memory of checksums throws.
  std::vector<Extent> take(const std::string& key, std::uint64_t nbytes);
  void give(const std::vector<Extent>& extents);

  /// Closes the files; nothing else may be called afterwards.
  void close() { volumes_.clear(); }

  const std::vector<Volume>& volumes() const noexcept { return volumes_; }
  /// The alignment for direct I/O on every volume: the strictest of each rule; at least whole
  /// grains where there are checksums.
  Alignment alignment() const noexcept { return alignment_; }
  /// Bytes of the volumes' files, and those of them not taken.
  std::uint64_t reserved_bytes() const;
  std::uint64_t free_bytes() const;
  /// Bytes that may still be taken: free ones and what the file systems would give. A file system
  /// that two volumes share counts once.
  std::uint64_t available_bytes() const;
  /// Bytes of one volume that are taken, and that may still be.
  std::uint64_t used_bytes(std::size_t index) const;
  std::uint64_t available_bytes(std::size_t index) const;
  const std::vector<double>& weights() const noexcept { return weights_; }

 private:
  void give_back(const std::vector<Extent>& extents);
  std::vector<Extent> take_whole(std::uint64_t nbytes);
  std::vector<Extent> take_striped(std::uint64_t nbytes);
  std::vector<std::vector<Extent>> take_shares(const std::vector<std::uint64_t>& shares,
                                               std::size_t* short_index);
  std::vector<Extent> take_on(std::size_t index, std::uint64_t nbytes);
  std::vector<VolumeRoom> find_rooms() const;
  StoreFullError full(const std::string& key, std::uint64_t nbytes, std::uint64_t rounded) const;
  bool grow(std::size_t index, std::uint64_t nbytes);

  std::vector<Volume> volumes_;
  std::vector<FreeSpace> free_;  // of the volume with the same index; backed as far as it has grown
  std::vector<double> weights_;
  Checksums* checksums_;
  std::uint64_t grow_bytes_ = 0;
  std::uint64_t stripe_bytes_ = 0;
  std::uint64_t extent_alignment_ = 0;  // of all offsets and sizes here
  Alignment alignment_{1, 1};
};

}  // namespace memascend

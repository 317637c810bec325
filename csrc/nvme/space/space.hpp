// Space: the store's volumes and their free space; allocates extents and grows the files.
//
// With several volumes a key is cut into stripes (nvme/space/stripes.hpp); a small key is placed
// whole on the volume with the least bytes for its weight. Knows volumes and their free space;
// never knows requests, and keys only as names in messages. Not thread-safe, but any thread may
// read volumes(), weights(), reserved_bytes() and used_bytes().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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
  std::uint64_t grow_bytes = std::uint64_t{256} << 20;  // growth step of the volumes' files
  std::uint64_t stripe_bytes = std::uint64_t{1} << 20;  // with several volumes
  std::vector<double> weights;                          // of the volumes; empty: all alike
  Checksums* checksums = nullptr;  // notified of extents taken and given; outlives the space
};

class Space {
 public:
  /// Pre: at least one volume. Files grow by `grow_bytes`, or by the bytes needed if that is more.
  /// Throws std::invalid_argument for weights that are not positive or not one per volume.
  Space(std::vector<Volume> volumes, const SpaceOptions& options);

  /// Takes space for `nbytes`; the extents are in the order of the key's bytes. On one volume it is
  /// one run, unless the volume is fragmented and full. On several it is striped in proportion to
  /// their weights; the share that one has no space for goes to the others. Throws StoreFullError,
  /// with nothing taken, if all together lack the space; and the exceptions of checksum memory.
  std::vector<Extent> take(const std::string& key, std::uint64_t nbytes);
  void give(const std::vector<Extent>& extents);
  /// Gives the space of free extents back to the file systems. Later extents take it again, if it
  /// is still there.
  void shrink();

  /// Tells devices that the stored data is no longer needed; see Volume::discard(). Calls
  /// `look(path, bytes done, bytes in all)` at intervals; an exception of it ends the discard.
  void discard(const std::function<void(const std::string&, std::uint64_t, std::uint64_t)>& look);
  /// Closes the files; nothing else may be called afterwards.
  void close() { volumes_.clear(); }

  const std::vector<Volume>& volumes() const noexcept { return volumes_; }
  /// The alignment for direct I/O on every volume: the strictest of each rule; with checksums at
  /// least a grain.
  Alignment alignment() const noexcept { return alignment_; }
  /// Bytes of the volumes' files, and the taken part of them, as of the end of the last change.
  std::uint64_t reserved_bytes() const;
  std::uint64_t used_bytes() const;
  std::uint64_t used_bytes(std::size_t index) const { return use_[index].used_bytes; }
  /// Bytes that may still be taken: free ones, and the possible growth of the files. A file system
  /// that two volumes share counts once. Throws StoreError if one cannot be queried.
  std::uint64_t available_bytes() const;
  const std::vector<double>& weights() const noexcept { return weights_; }

 private:
  /// The figures of one volume, for readers on any thread.
  struct Use {
    std::atomic<std::uint64_t> reserved_bytes = 0;
    std::atomic<std::uint64_t> used_bytes = 0;
  };
  std::vector<Extent> take_anywhere(const std::string& key, std::uint64_t nbytes);
  void give_back(const std::vector<Extent>& extents);
  void note_use();
  std::uint64_t taken_bytes(std::size_t index) const;
  Growth growth(std::size_t index) const;
  std::uint64_t limited_room(std::size_t index) const;
  std::uint64_t room_bytes(std::size_t index) const;
  std::vector<Extent> take_whole(std::uint64_t nbytes);
  std::vector<Extent> take_striped(std::uint64_t nbytes);
  std::vector<std::vector<Extent>> take_shares(const std::vector<std::uint64_t>& shares,
                                               std::size_t* short_index);
  std::vector<Extent> take_on(std::size_t index, std::uint64_t nbytes);
  std::vector<VolumeRoom> find_rooms() const;
  StoreFullError full(const std::string& key, std::uint64_t nbytes, std::uint64_t rounded) const;
  bool grow(std::size_t index, std::uint64_t nbytes);
  std::vector<FreeRun> pieces(std::size_t index, bool backed) const;
  bool refill(std::size_t index, std::uint64_t nbytes);
  bool refill(std::size_t index, const FreeRun& hole);

  std::vector<Volume> volumes_;
  std::vector<FreeSpace> free_;  // by volume; backed up to the file's current size, but for holes
  std::vector<std::uint64_t> hole_bytes_;  // by volume; inside the file, given back by shrink()
  std::unique_ptr<Use[]> use_;             // by volume
  std::vector<double> weights_;
  Checksums* checksums_;
  std::uint64_t grow_bytes_ = 0;
  std::uint64_t stripe_bytes_ = 0;
  std::uint64_t extent_alignment_ = 0;  // of all extents' offsets and sizes
  Alignment alignment_{1, 1};
};

}  // namespace memascend

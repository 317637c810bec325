#include "nvme/space.hpp"

#include <algorithm>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "nvme/errors.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kExtentAlignmentMin = 4096;  // a file system block: no extent shares one

}  // namespace

Space::Space(std::vector<Volume> volumes, std::uint64_t grow_bytes)
    : volumes_(std::move(volumes)), grow_bytes_(align_up(grow_bytes, kExtentAlignmentMin)) {
  MA_EXPECT(!volumes_.empty(), "a store needs at least one directory");
  for (const Volume& volume : volumes_) {
    const Alignment alignment = volume.alignment();
    alignment_.offset_bytes = std::max(alignment_.offset_bytes, alignment.offset_bytes);
    alignment_.memory_bytes = std::max(alignment_.memory_bytes, alignment.memory_bytes);
    free_.emplace_back(static_cast<int>(free_.size()),
                       std::max(kExtentAlignmentMin, alignment.offset_bytes));
  }
}

std::vector<Extent> Space::take(const std::string& key, std::uint64_t nbytes) {
  std::size_t best = 0;
  for (std::size_t index = 1; index < volumes_.size(); ++index) {
    if (available_bytes(index) > available_bytes(best)) best = index;
  }
  FreeExtents& free = free_[best];
  const std::uint64_t rounded = align_up(nbytes, free.alignment_bytes());
  if (rounded >= nbytes) {  // else the sum has wrapped: no volume is that large
    auto extent = free.take(rounded);
    if (!extent && grow(best, rounded)) extent = free.take(rounded);
    if (extent) return {*extent};
    std::vector<Extent> scattered = free.take_scattered(rounded);
    if (!scattered.empty()) return scattered;
  }
  const Volume& volume = volumes_[best];
  const std::uint64_t available = available_bytes(best);
  throw StoreFullError(
      join("cannot reserve ", nbytes, " bytes for \"", key, "\" in ", volume.directory(),
           ": needed ", rounded, " bytes, available ", available, " bytes\n",
           "likely cause: the file system, its quota or RLIMIT_FSIZE is exhausted\n",
           "fix: free at least ", rounded - std::min(rounded, available),
           " bytes there, or name a directory on a larger disk"),
      {key, volume.directory(), 0, nbytes, ENOSPC});
}

void Space::give(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    free_[static_cast<std::size_t>(extent.volume_index)].give(extent);
  }
}

std::uint64_t Space::reserved_bytes() const {
  std::uint64_t total = 0;
  for (const Volume& volume : volumes_) total += volume.capacity_bytes();
  return total;
}

std::uint64_t Space::free_bytes() const {
  std::uint64_t total = 0;
  for (const FreeExtents& free : free_) total += free.free_bytes();
  return total;
}

std::uint64_t Space::available_bytes() const {
  std::uint64_t total = 0;
  for (std::size_t index = 0; index < volumes_.size(); ++index) total += available_bytes(index);
  return total;
}

std::uint64_t Space::available_bytes(std::size_t index) const {
  return free_[index].free_bytes() + volumes_[index].available_bytes();
}

// Grows the file until a free run of `nbytes` ends at its end; false when the space is not there.
bool Space::grow(std::size_t index, std::uint64_t nbytes) {
  Volume& volume = volumes_[index];
  const std::uint64_t start = volume.capacity_bytes();
  const std::uint64_t needed = nbytes - free_[index].free_bytes_before(start);
  // A whole step first, then what is needed and no more.
  for (const std::uint64_t growth : {std::max(needed, grow_bytes_), needed}) {
    if (growth > UINT64_MAX - start) continue;
    try {
      volume.grow(start + growth);
    } catch (const VolumeFullError&) {
      continue;
    }
    free_[index].give({static_cast<int>(index), start, growth});
    return true;
  }
  return false;
}

}  // namespace memascend

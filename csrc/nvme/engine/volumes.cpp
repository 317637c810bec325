#include "nvme/engine/volumes.hpp"

#include <algorithm>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {
namespace {

// Alignment of our first byte on a device: larger than any logical block.
constexpr std::uint64_t kDeviceAlignment = 64 << 10;

}  // namespace

Volume open_volume(const VolumeOptions& volume) {
  if (volume.descriptor < 0) return Volume::open_anonymous(volume.path, volume.capacity_bytes);
  MA_EXPECT(volume.start_bytes > 0 && is_aligned(volume.start_bytes, kDeviceAlignment),
            "start_bytes of ", volume.path, " must be a positive multiple of ", kDeviceAlignment,
            ", got ", volume.start_bytes);
  const std::uint64_t room = UINT64_MAX - volume.start_bytes;
  const std::uint64_t limit =
      volume.start_bytes + align_down(std::min(volume.capacity_bytes, room), kDeviceAlignment);
  return Volume::adopt_device(volume.descriptor, volume.path, volume.start_bytes, limit);
}

std::vector<Volume> open_volumes(std::span<const VolumeOptions> volumes,
                                 const MemoryFaults* faults) {
  std::vector<Volume> opened;
  for (const VolumeOptions& volume : volumes) {
    if (faults == nullptr) {
      opened.push_back(open_volume(volume));
    } else {
      opened.push_back(Volume::open_in_memory(
          std::min(faults->capacity_bytes, volume.capacity_bytes), volume.path));
    }
  }
  return opened;
}

std::vector<double> weights_of(std::span<const VolumeOptions> volumes) {
  std::vector<double> weights;
  for (const VolumeOptions& volume : volumes) weights.push_back(volume.weight);
  return weights;
}

}  // namespace memascend

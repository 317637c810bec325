#include "nvme/volumes.hpp"

#include <algorithm>

namespace memascend {

std::vector<Volume> open_volumes(std::span<const VolumeOptions> volumes,
                                 const MemoryFaults* faults) {
  std::vector<Volume> opened;
  for (const VolumeOptions& volume : volumes) {
    if (faults == nullptr) {
      opened.push_back(Volume::open_anonymous(volume.path, volume.capacity_bytes));
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

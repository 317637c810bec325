// Volumes of a store: the options of each, and opening them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nvme/engine/memory.hpp"
#include "system/volume.hpp"

namespace memascend {

struct VolumeOptions {
  std::string path;                           // a directory, or the device behind `descriptor`
  double weight = 1;                          // its share of the bytes, against the other volumes'
  std::uint64_t capacity_bytes = UINT64_MAX;  // at most this of it is used
  int descriptor = -1;                        // of an opened block device; stays the caller's
  std::uint64_t start_bytes = 0;              // of the device, that are not ours
  std::vector<int> cpus = {};                 // near the drive: of its threads; empty: all
};

/// Throws SystemCallError naming the path, std::invalid_argument for a device without a header.
Volume open_volume(const VolumeOptions& volume);
/// Opens each volume; with `faults`, each in memory. Throws SystemCallError naming the path.
std::vector<Volume> open_volumes(std::span<const VolumeOptions> volumes,
                                 const MemoryFaults* faults);

std::vector<double> weights_of(std::span<const VolumeOptions> volumes);

}  // namespace memascend

// The options of a store's volumes, and functions that open them.
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
  double weight = 1;                          // share of the bytes, relative to the other volumes
  std::uint64_t capacity_bytes = UINT64_MAX;  // maximum to use
  int descriptor = -1;                        // an opened block device; the caller keeps it
  std::uint64_t start_bytes = 0;              // bytes at the device's start that are not ours
  std::vector<int> cpus = {};                 // near the drive, for its threads; empty: all
};

/// Throws SystemCallError naming the path, std::invalid_argument for a device without a header.
Volume open_volume(const VolumeOptions& volume);
/// Opens each volume; with `faults`, each in memory. Throws SystemCallError naming the path.
std::vector<Volume> open_volumes(std::span<const VolumeOptions> volumes,
                                 const MemoryFaults* faults);

std::vector<double> weights_of(std::span<const VolumeOptions> volumes);

}  // namespace memascend

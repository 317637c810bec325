// The statistics of a store, as plain values.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "nvme/transfer/traffic.hpp"

namespace memascend {

/// The use and traffic of one volume.
struct VolumeStats {
  std::string path;
  double weight;
  std::uint64_t used_bytes;
  bool copies_on_write;  // Volume::copies_on_write()
  LaneTraffic traffic;
};

struct StoreStats {
  std::map<std::string, std::uint64_t> counts;  // by their names in Python
  double wait_seconds;                          // waits, except of background threads
};

}  // namespace memascend

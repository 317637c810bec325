// What a store says of itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "nvme/transfer/traffic.hpp"

namespace memascend {

/// A volume and what of it is taken.
struct VolumeStats {
  std::string path;
  double weight;
  std::uint64_t used_bytes;
  bool copies_on_write;  // Volume::copies_on_write()
  LaneTraffic traffic;
};

struct StoreStats {
  std::map<std::string, std::uint64_t> counts;  // by the names that Python knows them by
  double wait_seconds;                          // spent in waiting, but for threads behind training
};

}  // namespace memascend

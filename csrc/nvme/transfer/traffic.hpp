// The traffic of a lane, as plain values.
#pragma once

#include <cstdint>

#include "nvme/transfer/latency.hpp"

namespace memascend {

/// Bytes as the device moved them: whole blocks, and again what was asked again.
struct MovedBytes {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
};

/// What went over a lane. Latencies are of requests, from their issue to their completion: of
/// writes without direct I/O, until the page cache has them.
struct LaneTraffic {
  MovedBytes moved;
  double busy_seconds = 0;  // with requests in flight
  Latencies::Summary reads;
  Latencies::Summary writes;
  Latencies::Summary needed;  // of both, those of transfers that somebody waited for
};

}  // namespace memascend

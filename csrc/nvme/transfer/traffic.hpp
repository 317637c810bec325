// The traffic of a lane, as plain values.
#pragma once

#include <cstdint>

#include "nvme/transfer/latency.hpp"

namespace memascend {

/// Bytes that the device moved: in whole blocks, retries included.
struct MovedBytes {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
};

/// The traffic of a lane. Latency is the time of a request from issue to completion; a write
/// without direct I/O completes when the page cache has the data.
struct LaneTraffic {
  MovedBytes moved;
  double busy_seconds = 0;  // with requests in flight
  Latencies::Summary reads;
  Latencies::Summary writes;
  Latencies::Summary needed;  // of both, those of transfers that a caller waited for
};

}  // namespace memascend

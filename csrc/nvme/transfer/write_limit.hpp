// WriteLimit: limits the writes in a device's queue while a caller waits for reads.
//
// A read is served after the writes that the device already has, and a full queue of them is
// 128 MiB: 40 ms at 3 GB/s, 250 ms at 0.5 GB/s. A drive reaches its full rate with a small part of
// that. So while callers wait for reads, other writes may fill only a part of the queue. After many
// bytes of writes without such a read they may fill all of it, which arrays of drives and network
// drives need. Counts bytes instead of time, so that the rule is the same for every drive. Pure
// arithmetic; one thread.
#pragma once

#include <cstdint>

namespace memascend {

class WriteLimit {
 public:
  static constexpr std::uint64_t kQueueShare = 8;   // writes may then fill an eighth of the queue
  static constexpr std::uint64_t kQuietQueues = 4;  // writes without a needed read: no limit

  /// `queue_bytes`: the bytes of a full queue.
  explicit WriteLimit(std::uint64_t queue_bytes)
      : queue_bytes_(queue_bytes), quiet_bytes_(kQuietQueues * queue_bytes) {}

  /// Returns whether a write of `nbytes` may begin; a single one always may.
  bool allows(std::uint64_t nbytes) const noexcept {
    if (in_flight_bytes_ == 0) return true;
    if (quiet_bytes_ >= kQuietQueues * queue_bytes_) return true;
    return in_flight_bytes_ + nbytes <= queue_bytes_ / kQueueShare;
  }
  void begin(std::uint64_t nbytes) noexcept {
    in_flight_bytes_ += nbytes;
    quiet_bytes_ += nbytes;
  }
  void end(std::uint64_t nbytes) noexcept { in_flight_bytes_ -= nbytes; }
  /// A read that a caller waits for begins or ends.
  void note_needed_read() noexcept { quiet_bytes_ = 0; }

 private:
  const std::uint64_t queue_bytes_;
  std::uint64_t in_flight_bytes_ = 0;
  std::uint64_t quiet_bytes_;  // written since the last needed read
};

}  // namespace memascend

// TransferQueue: the lanes of a store's volumes. Cuts a transfer into what lies on each volume,
// hands that to the volumes' lanes, and knows when the last of them is done.
//
// Knows volumes; never knows what keys mean, who waits, or which transfers must follow each other.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nvme/transfer/lane.hpp"

namespace memascend {

class TransferQueue {
 public:
  /// Starts a lane for each of `volumes`, which outlive the queue, with the engine of the same
  /// index. Throws SystemCallError when an engine cannot start, std::invalid_argument for unusable
  /// options. `finished` may be called by several threads at once.
  TransferQueue(std::vector<std::unique_ptr<Engine>> engines, std::span<const Volume> volumes,
                const Alignment& alignment, const TransferOptions& options,
                Lane::Finished finished);
  /// Pre: every transfer has been reported.
  ~TransferQueue() = default;
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Any thread; never waits for I/O. Pre: the transfer has at least one piece.
  void submit(Transfer* transfer);
  /// Somebody waits: what has not been issued goes before other transfers. Pre: not yet reported.
  void hurry(Transfer* transfer);
  /// Throws StoreError while a device has not answered for the watchdog's time.
  void refuse_silence(const std::string& recovery);
  /// One phrase on what the engines really obtained.
  std::string engine_description() const;
  const Lane& lane(std::size_t volume_index) const { return *lanes_[volume_index]; }
  const TransferCounters& counters() const noexcept { return shared_.counters; }

 private:
  Lane::Shared shared_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // of the volume with the same index
};

}  // namespace memascend

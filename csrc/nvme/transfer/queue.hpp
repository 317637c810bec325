// TransferQueue: the lanes of a store's volumes. Splits a transfer into a part per volume and
// submits the parts to the lanes.
//
// Knows volumes; never knows the meaning of keys, the waiting threads, or the order of transfers.
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
  /// index. Throws SystemCallError if an engine cannot start, std::invalid_argument for unusable
  /// options. Several threads may call `finished` at the same time.
  TransferQueue(std::vector<std::unique_ptr<Engine>> engines, std::span<const Volume> volumes,
                const Alignment& alignment, const TransferOptions& options,
                Lane::Finished finished);
  /// Pre: every transfer has been reported.
  ~TransferQueue() = default;
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Any thread; never waits for I/O. Pre: the transfer has at least one piece.
  void submit(Transfer* transfer);
  /// A caller waits: the unissued pieces go before other transfers. Pre: not yet reported.
  void hurry(Transfer* transfer);
  /// Throws StoreError if a device has been silent for the watchdog's time.
  void refuse_silence(const std::string& recovery);
  /// One phrase on the engines and the features they obtained.
  std::string engine_description() const;
  const Lane& lane(std::size_t volume_index) const { return *lanes_[volume_index]; }
  const TransferCounters& counters() const noexcept { return shared_.counters; }

 private:
  Lane::Shared shared_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // of the volume with the same index
};

}  // namespace memascend

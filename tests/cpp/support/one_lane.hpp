// A queue with one lane over an engine of the test's, and transfers of a block each.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "nvme/transfer/queue.hpp"
#include "support/expect.hpp"

namespace memascend {

struct OneLane {
  static constexpr std::uint64_t kBlock = 4096;
  static constexpr std::uint64_t kBytes = 1 << 20;

  alignas(4096) static inline std::byte bounce[64 * 1024];
  alignas(4096) static inline std::byte memory[kBytes + kBlock];

  std::vector<Volume> volumes;
  std::deque<Transfer> transfers;
  std::mutex mutex;
  std::condition_variable changed;
  std::set<const Transfer*> over;
  std::unique_ptr<TransferQueue> queue;

  OneLane() {
    volumes.push_back(Volume::open_in_memory(kBytes));
    volumes.front().grow(kBytes);
  }

  const Volume& volume() const { return volumes.front(); }

  void start(std::unique_ptr<Engine> engine, TransferOptions options = {}) {
    std::vector<std::unique_ptr<Engine>> engines;
    engines.push_back(std::move(engine));
    options.chunk_bytes = kBlock;
    options.bounce = bounce;
    queue = std::make_unique<TransferQueue>(std::move(engines), volumes, volume().alignment(),
                                            options, [this](std::span<Transfer* const> finished) {
                                              const std::lock_guard lock(mutex);
                                              over.insert(finished.begin(), finished.end());
                                              changed.notify_all();
                                            });
  }

  /// Starts a transfer of `count` blocks from block `begin` on; `shift` bytes behind a page of
  /// memory it is bounced.
  Transfer* submit(Operation operation, std::uint64_t begin, std::uint64_t count = 1,
                   bool needed = false, std::uint64_t shift = 0) {
    Transfer& transfer = transfers.emplace_back();
    transfer.operation = operation;
    transfer.key = join("key ", begin);
    transfer.needed = needed;
    const std::uint64_t nbytes = count * kBlock;
    transfer.pieces =
        cut({operation, nbytes, 0, nbytes, memory + begin * kBlock + shift, nbytes},
            std::vector<Extent>{{0, begin * kBlock, nbytes, 0}}, volume().alignment());
    queue->submit(&transfer);
    return &transfer;
  }

  /// The time is for a test that fails.
  void wait_for(const Transfer* transfer) {
    std::unique_lock lock(mutex);
    EXPECT(
        changed.wait_for(lock, std::chrono::seconds(60), [&] { return over.contains(transfer); }));
  }
  void wait_for_all() {
    for (const Transfer& transfer : transfers) wait_for(&transfer);
  }
};

}  // namespace memascend

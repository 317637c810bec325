// sources: csrc/base/*.cpp csrc/os/volume.cpp csrc/nvme/*.cpp
//
// The transfer queue's watchdog: it speaks of a silent device, and of nothing else.
#include "nvme/transfer.hpp"

#include <cstdio>
#include <future>
#include <thread>

#include "base/check.hpp"
#include "nvme/engine_memory.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kBytes = 4096;
constexpr milliseconds kWatchdog{300};

alignas(4096) std::byte bounce[64 * 1024];
alignas(4096) std::byte memory[kBytes];

/// A queue over the memory engine, one transfer, and what the watchdog said.
struct Bench {
  std::shared_ptr<MemoryFaults> faults = std::make_shared<MemoryFaults>();
  std::vector<Volume> volumes;
  std::atomic<int> report_count = 0;
  std::promise<void> finished;
  Transfer transfer;
  std::unique_ptr<TransferQueue> queue;

  Bench() {
    volumes.push_back(Volume::open_in_memory(1 << 20));
    volumes.front().grow(1 << 20);
    const Alignment alignment = volumes.front().alignment();
    TransferQueue::Options options;
    options.bounce = bounce;
    options.watchdog = kWatchdog;
    options.report = [this](const std::string&) { ++report_count; };
    transfer.operation = Operation::kWrite;
    transfer.key = "k";
    transfer.pieces = cut({Operation::kWrite, kBytes, 0, kBytes, memory, kBytes},
                          std::vector<Extent>{{0, 0, kBytes}}, alignment);
    queue = std::make_unique<TransferQueue>(
        std::make_unique<MemoryEngine>(faults, 4), volumes, alignment, options,
        [this](std::span<Transfer* const>) { finished.set_value(); });
  }
};

void a_silent_device_is_reported_once() {
  Bench bench;
  bench.faults->paused = true;
  bench.queue->submit(&bench.transfer);
  std::this_thread::sleep_for(kWatchdog * 3);
  bench.faults->paused = false;
  bench.finished.get_future().get();
  MA_INVARIANT(bench.report_count == 1);
}

// What the queue's own thread did before the first request is not the device's silence.
void a_slow_action_is_not_the_devices_silence() {
  Bench bench;
  std::promise<void> entered;
  std::promise<void> leave;
  std::thread first([&] {
    bench.queue->call([&](Engine&) {
      entered.set_value();
      leave.get_future().get();
    });
  });
  entered.get_future().get();
  // Both wait for the first action to end, so that the queue's thread takes them in one turn.
  bench.queue->submit(&bench.transfer);
  std::thread second([&] {
    bench.queue->call([&](Engine& engine) {
      std::this_thread::sleep_for(kWatchdog * 2);
      bench.faults->paused = true;
      engine.wake();
    });
  });
  std::this_thread::sleep_for(milliseconds(50));
  leave.set_value();
  first.join();
  second.join();
  std::this_thread::sleep_for(milliseconds(20));
  bench.faults->paused = false;
  bench.finished.get_future().get();
  MA_INVARIANT(bench.report_count == 0);
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::a_silent_device_is_reported_once();
  memascend::a_slow_action_is_not_the_devices_silence();
  return 0;
}

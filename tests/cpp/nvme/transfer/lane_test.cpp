// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// A lane's patience: its watchdog speaks of a silent device, and of nothing else; what fails with
// EIO is asked again, a stated number of times, and what fails with EAGAIN for a stated time.
#include "nvme/transfer/lane.hpp"

#include <cstdio>
#include <future>
#include <thread>

#include "base/check.hpp"
#include "nvme/transfer/queue.hpp"
#include "support/memory_engines.hpp"
#include "support/one_lane.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kBytes = 4096;
constexpr milliseconds kWatchdog{300};

alignas(4096) std::byte bounce[64 * 1024];
alignas(4096) std::byte memory[kBytes];

struct Failures {
  int count = 0;
  int code = EIO;
};

/// The memory engine, on which the first requests fail.
class FailingEngine final : public Engine {
 public:
  FailingEngine(const EngineOptions& options, const Volume& volume, Failures failures,
                std::atomic<int>* requests)
      : faults_(options.faults),
        inner_(options, volume),
        failures_(failures),
        requests_(requests) {}
  std::string name() const override { return "failing"; }
  std::string description() const override { return inner_.description(); }
  std::size_t queue_depth() const override { return inner_.queue_depth(); }
  void start() override {}
  void submit(std::span<const Request> requests) override {
    *requests_ += static_cast<int>(requests.size());
    inner_.submit(requests);
  }
  std::size_t reap(std::span<Completion> completions, milliseconds timeout) override {
    faults_->gone = failures_.count > 0 ? failures_.code : 0;
    const std::size_t count = inner_.reap(completions.first(1), timeout);
    if (count > 0) --failures_.count;
    return count;
  }
  void wake() noexcept override { inner_.wake(); }

 private:
  std::shared_ptr<MemoryFaults> faults_;
  MemoryEngine inner_;
  Failures failures_;
  std::atomic<int>* requests_;
};

/// A queue over the memory engine, one transfer, and what the watchdog said.
struct Bench {
  std::shared_ptr<MemoryFaults> faults = std::make_shared<MemoryFaults>();
  std::vector<Volume> volumes;
  std::atomic<int> report_count = 0;
  std::atomic<int> request_count = 0;
  std::promise<void> finished;
  Transfer transfer;
  std::unique_ptr<TransferQueue> queue;

  explicit Bench(Failures failures = {}, TransferOptions options = {}) {
    volumes.push_back(Volume::open_in_memory(1 << 20));
    volumes.front().grow(1 << 20);
    const Alignment alignment = volumes.front().alignment();
    options.bounce = bounce;
    options.watchdog = kWatchdog;
    options.report = [this](const std::string&) { ++report_count; };
    transfer.operation = Operation::kWrite;
    transfer.key = "k";
    transfer.pieces = cut({Operation::kWrite, kBytes, 0, kBytes, memory, kBytes},
                          std::vector<Extent>{{0, 0, kBytes}}, alignment);
    std::vector<std::unique_ptr<Engine>> engines;
    engines.push_back(std::make_unique<FailingEngine>(memory_options(faults, 4), volumes.front(),
                                                      failures, &request_count));
    queue = std::make_unique<TransferQueue>(
        std::move(engines), volumes, alignment, options,
        [this](std::span<Transfer* const>) { finished.set_value(); });
  }
};

void a_silent_device_is_reported_once() {
  Bench bench;
  bench.faults->paused = true;
  bench.queue->submit(&bench.transfer);
  std::this_thread::sleep_for(kWatchdog * 3);
  const auto is_silent = [&] {
    try {
      bench.queue->refuse_silence("wait");
    } catch (const StoreError& error) {
      MA_INVARIANT(error.place().key == "k" && error.place().code == ETIMEDOUT);
      return true;
    }
    return false;
  };
  MA_INVARIANT(is_silent());
  bench.faults->paused = false;
  bench.finished.get_future().get();
  MA_INVARIANT(bench.report_count == 1);
  while (is_silent()) std::this_thread::sleep_for(milliseconds(1));
}

// The time without any request is not the device's silence.
void an_idle_queue_is_not_the_devices_silence() {
  Bench bench;
  std::this_thread::sleep_for(kWatchdog * 2);
  bench.faults->paused = true;
  bench.queue->submit(&bench.transfer);
  std::this_thread::sleep_for(milliseconds(20));
  bench.faults->paused = false;
  bench.finished.get_future().get();
  MA_INVARIANT(bench.report_count == 0);
}

void an_eio_of_a_moment_is_tried_again_after_a_pause() {
  TransferOptions options;
  options.eio_retries = 3;
  options.eio_pause = milliseconds(40);
  Bench bench({3}, options);
  const auto start = std::chrono::steady_clock::now();
  bench.queue->submit(&bench.transfer);
  bench.finished.get_future().get();
  MA_INVARIANT(std::chrono::steady_clock::now() - start >= 3 * options.eio_pause);
  MA_INVARIANT(!bench.transfer.error);
  MA_INVARIANT(bench.request_count == 4);
  MA_INVARIANT(bench.queue->counters().eio_retries == 3);
  MA_INVARIANT(bench.queue->counters().retries == 0);
}

void an_eio_that_stays_is_an_error_after_as_many_tries_as_stated() {
  for (const unsigned eio_retries : {0U, 2U}) {
    TransferOptions options;
    options.eio_retries = eio_retries;
    options.eio_pause = milliseconds(1);
    Bench bench({1000}, options);
    bench.queue->submit(&bench.transfer);
    bench.finished.get_future().get();
    MA_INVARIANT(bench.transfer.error && bench.transfer.error->code == EIO);
    MA_INVARIANT(bench.request_count == static_cast<int>(eio_retries) + 1);
    MA_INVARIANT(bench.queue->counters().eio_retries == eio_retries);
  }
}

void no_other_error_is_tried_again() {
  for (const int code : {ENOSPC, ENODEV, ENXIO, EROFS, EDQUOT, EFAULT, EINVAL}) {
    Bench bench({1, code});
    bench.queue->submit(&bench.transfer);
    bench.finished.get_future().get();
    MA_INVARIANT(bench.transfer.error && bench.transfer.error->code == code);
    MA_INVARIANT(bench.request_count == 1);
    MA_INVARIANT(bench.queue->counters().eio_retries == 0);
  }
}

void an_eagain_or_enomem_is_asked_again_until_the_device_is_ready() {
  for (const int code : {EAGAIN, ENOMEM}) {
    Bench bench({10, code});
    const auto start = std::chrono::steady_clock::now();
    bench.queue->submit(&bench.transfer);
    bench.finished.get_future().get();
    MA_INVARIANT(!bench.transfer.error);
    MA_INVARIANT(bench.request_count == 11);
    MA_INVARIANT(bench.queue->counters().retries == 10);
    MA_INVARIANT(std::chrono::steady_clock::now() - start >=
                 milliseconds(10));  // pauses, no spinning
  }
}

void an_eagain_that_stays_is_an_error_after_the_time_stated() {
  TransferOptions options;
  options.again_limit = milliseconds(60);
  Bench bench({1'000'000, EAGAIN}, options);
  const auto start = std::chrono::steady_clock::now();
  bench.queue->submit(&bench.transfer);
  bench.finished.get_future().get();
  MA_INVARIANT(std::chrono::steady_clock::now() - start >= options.again_limit);
  MA_INVARIANT(bench.transfer.error && bench.transfer.error->code == EAGAIN);
  MA_INVARIANT(bench.request_count < 64);
}

// A request that is paused is not with the device: the report names one that is.
void the_stall_report_names_a_request_that_the_device_has() {
  constexpr milliseconds kSilence{100};
  TransferOptions options;
  options.watchdog = kSilence;
  options.eio_pause = 15 * kSilence;
  std::promise<std::string> told;
  options.report = [&](const std::string& text) { told.set_value(text); };
  const auto faults = std::make_shared<MemoryFaults>();
  std::atomic<int> request_count = 0;
  OneLane lane;
  lane.start(std::make_unique<FailingEngine>(memory_options(faults, 4), lane.volume(), Failures{1},
                                             &request_count),
             options);
  const Transfer* paused = lane.submit(Operation::kWrite, 0);
  while (lane.queue->counters().eio_retries == 0) std::this_thread::yield();
  faults->paused = true;
  const Transfer* silent = lane.submit(Operation::kWrite, 1);
  const std::string text = told.get_future().get();
  MA_INVARIANT(text.find(silent->key) != std::string::npos);
  MA_INVARIANT(text.find(paused->key) == std::string::npos);
  faults->paused = false;
  lane.wait_for_all();
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::a_silent_device_is_reported_once();
  memascend::an_idle_queue_is_not_the_devices_silence();
  memascend::an_eio_of_a_moment_is_tried_again_after_a_pause();
  memascend::an_eio_that_stays_is_an_error_after_as_many_tries_as_stated();
  memascend::no_other_error_is_tried_again();
  memascend::an_eagain_or_enomem_is_asked_again_until_the_device_is_ready();
  memascend::an_eagain_that_stays_is_an_error_after_the_time_stated();
  memascend::the_stall_report_names_a_request_that_the_device_has();
  return 0;
}

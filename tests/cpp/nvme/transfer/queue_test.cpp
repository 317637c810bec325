// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// The transfer queue over several volumes: a slow one holds up its own lane and nothing else.
#include "nvme/transfer/queue.hpp"

#include <array>
#include <condition_variable>
#include <cstdio>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "base/check.hpp"
#include "support/memory_engines.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kChunk = 4096;
constexpr std::size_t kDepth = 32;
constexpr std::size_t kVolumeCount = 2;

alignas(4096) std::byte bounce[64 * 1024];
alignas(4096) std::byte memory[1 << 20];

/// The memory engine, and the most requests it had in flight.
class CountingEngine final : public Engine {
 public:
  CountingEngine(const EngineOptions& options, const Volume& volume, std::size_t* most)
      : inner_(options, volume), most_(most) {}
  std::string name() const override { return "counting"; }
  std::string description() const override { return inner_.description(); }
  std::size_t queue_depth() const override { return inner_.queue_depth(); }
  void start() override { inner_.start(); }
  void submit(std::span<const Request> requests) override {
    in_flight_count_ += requests.size();
    *most_ = std::max(*most_, in_flight_count_);
    inner_.submit(requests);
  }
  std::size_t reap(std::span<Completion> completions, milliseconds timeout) override {
    const std::size_t count = inner_.reap(completions, timeout);
    in_flight_count_ -= count;
    return count;
  }
  void wake() noexcept override { inner_.wake(); }

 private:
  MemoryEngine inner_;
  std::size_t* most_;
  std::size_t in_flight_count_ = 0;
};

struct Bench {
  std::shared_ptr<MemoryFaults> faults = std::make_shared<MemoryFaults>();
  std::vector<Volume> volumes;
  std::array<std::size_t, kVolumeCount> most{};
  std::vector<std::string> reports;
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::mutex mutex;
  std::condition_variable changed;
  std::set<const Transfer*> finished;
  std::unique_ptr<TransferQueue> queue;

  explicit Bench(milliseconds watchdog = milliseconds{60'000},
                 milliseconds window = milliseconds{60'000}) {
    for (std::size_t index = 0; index < kVolumeCount; ++index) {
      volumes.push_back(Volume::open_in_memory(1 << 20, join("volume ", index)));
      volumes.back().grow(1 << 20);
    }
    std::vector<std::unique_ptr<Engine>> engines;
    for (std::size_t index = 0; index < kVolumeCount; ++index) {
      engines.push_back(std::make_unique<CountingEngine>(
          memory_options(faults, kDepth, static_cast<int>(index)), volumes[index], &most[index]));
    }
    TransferOptions options;
    options.chunk_bytes = kChunk;
    options.bounce = bounce;
    options.watchdog = watchdog;
    options.pace.window = window;
    options.report = [this](const std::string& text) {
      const std::lock_guard lock(mutex);
      reports.push_back(text);
    };
    queue =
        std::make_unique<TransferQueue>(std::move(engines), volumes, volumes.front().alignment(),
                                        options, [this](std::span<Transfer* const> over) {
                                          const std::lock_guard lock(mutex);
                                          finished.insert(over.begin(), over.end());
                                          changed.notify_all();
                                        });
  }

  /// Starts a write of `nbytes` from `shift` bytes behind a page, on one volume.
  const Transfer* submit(int volume_index, std::uint64_t nbytes, std::uint64_t shift = 0) {
    auto transfer = std::make_unique<Transfer>();
    transfer->operation = Operation::kWrite;
    transfer->key = "k";
    transfer->pieces =
        cut({Operation::kWrite, nbytes, 0, nbytes, memory + shift, nbytes},
            std::vector<Extent>{{volume_index, 0, 1 << 20}}, volumes.front().alignment());
    transfers.push_back(std::move(transfer));
    queue->submit(transfers.back().get());
    return transfers.back().get();
  }

  bool wait_for(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(30), condition);
  }
  bool wait_for(const Transfer* transfer) {
    return wait_for([&] { return finished.contains(transfer); });
  }
  /// Takes turns until something is reported, and then for a while; whether there was one report.
  bool repeat_until_told_of_once(const std::function<void()>& turn, milliseconds then) {
    const auto told = [&] {
      const std::lock_guard lock(mutex);
      return reports.size();
    };
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (told() == 0 && std::chrono::steady_clock::now() < deadline) turn();
    const auto end = std::chrono::steady_clock::now() + then;
    while (std::chrono::steady_clock::now() < end) turn();
    return told() == 1;
  }
  void resume_and_wait() {
    faults->paused_volume = -1;
    MA_INVARIANT(wait_for([&] { return finished.size() == transfers.size(); }));
  }
};

void a_silent_volume_fills_its_own_lane_only() {
  Bench bench;
  bench.faults->paused_volume = 1;
  const Transfer* slow = bench.submit(1, 64 * kChunk);
  for (int turn = 0; turn < 20; ++turn) MA_INVARIANT(bench.wait_for(bench.submit(0, 64 * kChunk)));
  {
    const std::lock_guard lock(bench.mutex);
    MA_INVARIANT(!bench.finished.contains(slow));
  }
  bench.resume_and_wait();
  bench.queue.reset();
  MA_INVARIANT(bench.most[0] == kDepth);
  MA_INVARIANT(bench.most[1] == kDepth);
}

// A wait for an eighth of all requests in flight would wait for the silent ones.
void few_requests_beside_a_silent_volume_come_back() {
  Bench bench;
  bench.faults->paused_volume = 1;
  bench.submit(1, 64 * kChunk);
  for (int turn = 0; turn < 20; ++turn) MA_INVARIANT(bench.wait_for(bench.submit(0, kChunk)));
  bench.resume_and_wait();
}

void a_silent_volume_does_not_take_every_bounce_buffer() {
  Bench bench;
  bench.faults->paused_volume = 1;
  bench.submit(1, 64 * kChunk, 1);
  MA_INVARIANT(bench.wait_for(bench.submit(0, 64 * kChunk, 1)));
  bench.resume_and_wait();
}

void a_volume_that_is_silent_beside_a_lively_one_is_reported() {
  Bench bench(milliseconds{50});
  bench.faults->paused_volume = 1;
  bench.submit(1, kChunk);
  const auto turn = [&] { MA_INVARIANT(bench.wait_for(bench.submit(0, kChunk))); };
  MA_INVARIANT(bench.repeat_until_told_of_once(turn, milliseconds{150}));
  bench.resume_and_wait();
  MA_INVARIANT(bench.reports.size() == 1);
  MA_INVARIANT(bench.reports.front().find("volume 1") != std::string::npos);
}

// Volume 1 takes 10 ms for a request, the other microseconds.
void a_volume_far_slower_than_the_other_is_named_once_and_waited_for() {
  Bench bench(milliseconds{60'000}, milliseconds{100});
  bench.faults->slow_volume = 1;
  bench.faults->slow_milliseconds = 10;
  const auto turn = [&] {
    const Transfer* slow = bench.submit(1, 4 * kChunk);
    MA_INVARIANT(bench.wait_for(bench.submit(0, 64 * kChunk)));
    MA_INVARIANT(bench.wait_for(slow));
  };
  MA_INVARIANT(bench.repeat_until_told_of_once(turn, milliseconds{500}));
  MA_INVARIANT(bench.queue->counters().slow_spells >= 1);  // a busy machine may part it in two
  bench.resume_and_wait();
  MA_INVARIANT(bench.reports.size() == 1);
  MA_INVARIANT(bench.reports.front().starts_with("volume 1 is far slower than the other volumes"));
}

// Each takes 2 ms for a request, beside which little is what a busy machine adds.
void volumes_that_are_alike_are_not_named() {
  Bench bench(milliseconds{60'000}, milliseconds{100});
  bench.faults->slow_volume = MemoryFaults::kEveryVolume;
  bench.faults->slow_milliseconds = 2;
  const auto end = std::chrono::steady_clock::now() + milliseconds{500};
  while (std::chrono::steady_clock::now() < end) {
    const Transfer* other = bench.submit(1, 8 * kChunk);
    MA_INVARIANT(bench.wait_for(bench.submit(0, 8 * kChunk)));
    MA_INVARIANT(bench.wait_for(other));
  }
  MA_INVARIANT(bench.queue->counters().slow_spells == 0);
}

// Volume 0 is in a pause after an EIO when volume 1 is gone: what is left out for that is no error.
void the_first_error_is_the_one_reported() {
  std::vector<Volume> volumes;
  std::vector<std::unique_ptr<Engine>> engines;
  for (int index = 0; index < 2; ++index) {
    volumes.push_back(Volume::open_in_memory(1 << 20, join("volume ", index)));
    volumes.back().grow(1 << 20);
  }
  for (int index = 0; index < 2; ++index) {
    const auto faults = std::make_shared<MemoryFaults>();
    faults->gone = index == 0 ? EIO : ENODEV;
    engines.push_back(std::make_unique<MemoryEngine>(memory_options(faults, kDepth, index),
                                                     volumes[static_cast<std::size_t>(index)]));
  }
  TransferOptions options;
  options.bounce = bounce;
  options.eio_pause = milliseconds(500);
  std::promise<void> finished;
  const Alignment alignment = volumes.front().alignment();
  TransferQueue queue(std::move(engines), volumes, alignment, options,
                      [&](std::span<Transfer* const>) { finished.set_value(); });
  Transfer transfer;
  transfer.key = "k";
  transfer.pieces = cut({Operation::kRead, 2 * kChunk, 0, 2 * kChunk, memory, 2 * kChunk},
                        std::vector<Extent>{{0, 0, kChunk, 0}, {1, 0, kChunk, kChunk}}, alignment);
  queue.submit(&transfer);
  finished.get_future().get();
  MA_INVARIANT(transfer.error && transfer.error->code == ENODEV);
  MA_INVARIANT(transfer.error->volume == "volume 1");
}

void bounce_buffers_below_a_block_per_volume_are_refused() {
  std::vector<Volume> volumes;
  for (int count = 0; count < 3; ++count) volumes.push_back(Volume::open_in_memory(1 << 20));
  TransferOptions options;
  options.bounce = std::span(bounce).first(2 * 512);
  try {
    TransferQueue(memory_engines(std::make_shared<MemoryFaults>(), 2, volumes), volumes,
                  volumes.front().alignment(), options, [](std::span<Transfer* const>) {});
    MA_INVARIANT(false && "opened");
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::a_silent_volume_fills_its_own_lane_only();
  memascend::few_requests_beside_a_silent_volume_come_back();
  memascend::a_silent_volume_does_not_take_every_bounce_buffer();
  memascend::a_volume_that_is_silent_beside_a_lively_one_is_reported();
  memascend::a_volume_far_slower_than_the_other_is_named_once_and_waited_for();
  memascend::volumes_that_are_alike_are_not_named();
  memascend::the_first_error_is_the_one_reported();
  memascend::bounce_buffers_below_a_block_per_volume_are_refused();
  return 0;
}

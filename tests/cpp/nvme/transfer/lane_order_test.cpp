// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// A lane's order: what somebody waits for first, writes last, and none for ever; direct and bounced
// pieces by turns. What is over is reported whatever else is with the device, and while reads are
// waited for, the device has only a part of the writes.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "base/check.hpp"
#include "nvme/transfer/lane.hpp"
#include "support/memory_engines.hpp"
#include "support/one_lane.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kDepth = 64;

/// The memory engine with one request at a time, and the blocks in the order of their requests.
class OrderedEngine final : public Engine {
 public:
  OrderedEngine(const EngineOptions& options, const Volume& volume,
                std::vector<std::uint64_t>* blocks)
      : inner_(options, volume), blocks_(blocks) {}
  std::string name() const override { return "ordered"; }
  std::string description() const override { return inner_.description(); }
  std::size_t queue_depth() const override { return 1; }
  void start() override {}
  void submit(std::span<const Request> requests) override {
    for (const Request& request : requests) blocks_->push_back(request.offset / OneLane::kBlock);
    inner_.submit(requests);
  }
  std::size_t reap(std::span<Completion> completions, milliseconds timeout) override {
    return inner_.reap(completions, timeout);
  }
  void wake() noexcept override { inner_.wake(); }

 private:
  MemoryEngine inner_;
  std::vector<std::uint64_t>* blocks_;
};

/// A lane of one request at a time, held until run().
struct OrderBench {
  std::shared_ptr<MemoryFaults> faults = std::make_shared<MemoryFaults>();
  std::vector<std::uint64_t> order;
  OneLane lane;

  OrderBench() {
    faults->paused = true;
    lane.start(std::make_unique<OrderedEngine>(memory_options(faults, 1), lane.volume(), &order));
    submit(Operation::kRead);  // the one in flight, behind which all others wait
    while (lane.queue->counters().requests == 0) std::this_thread::yield();
  }

  /// A transfer of the block that is its number.
  Transfer* submit(Operation operation, std::uint64_t shift = 0) {
    return lane.submit(operation, lane.transfers.size(), 1, false, shift);
  }

  std::vector<std::uint64_t> run() {
    faults->paused = false;
    lane.wait_for_all();
    lane.queue.reset();
    return order;
  }
};

void what_is_waited_for_goes_first_and_writes_last() {
  OrderBench bench;
  bench.submit(Operation::kWrite);                      // 1
  bench.submit(Operation::kRead);                       // 2
  Transfer* needed = bench.submit(Operation::kRead);    // 3
  Transfer* flushed = bench.submit(Operation::kWrite);  // 4
  bench.submit(Operation::kRead);                       // 5
  bench.lane.queue->hurry(needed);
  bench.lane.queue->hurry(flushed);
  MA_INVARIANT((bench.run() == std::vector<std::uint64_t>{0, 3, 4, 2, 5, 1}));
}

void a_write_is_not_passed_over_for_ever() {
  OrderBench bench;
  bench.submit(Operation::kWrite);
  for (int count = 0; count < 20; ++count) bench.submit(Operation::kRead);
  const std::vector<std::uint64_t> order = bench.run();
  const auto place = std::find(order.begin(), order.end(), 1) - order.begin();
  MA_INVARIANT(place > 4 && place < 12);
}

// There is bounce memory for all of them.
void direct_pieces_take_turns_with_bounced_ones() {
  OrderBench bench;
  for (int count = 0; count < 8; ++count) bench.submit(Operation::kRead, 1);  // 1 to 8
  bench.submit(Operation::kRead);                                             // 9
  bench.submit(Operation::kRead);                                             // 10
  const std::vector<std::uint64_t> order = bench.run();
  const auto place = std::find(order.begin(), order.end(), 10) - order.begin();
  MA_INVARIANT(place <= 4);
}

/// Reads are over at once, writes when they are let go.
class HoldingEngine final : public Engine {
 public:
  std::string name() const override { return "holding"; }
  std::string description() const override { return "holding"; }
  std::size_t queue_depth() const override { return kDepth; }
  void start() override {}
  void submit(std::span<const Request> requests) override {
    const std::lock_guard lock(mutex_);
    for (const Request& request : requests) {
      const bool writes = request.operation == Operation::kWrite;
      (writes ? writes_ : over_)
          .push_back({request.tag, static_cast<std::int64_t>(request.nbytes)});
    }
    most_ = std::max(most_, writes_.size());
    changed_.notify_all();
  }
  std::size_t reap(std::span<Completion> completions, milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    const auto is_ready = [&] { return woken_ || !over_.empty() || (free_ && !writes_.empty()); };
    changed_.wait_for(lock, timeout, is_ready);
    woken_ = false;
    std::size_t count = 0;
    for (std::vector<Completion>* some : {&over_, &writes_}) {
      if (some == &writes_ && !free_) continue;
      for (; count < completions.size() && !some->empty(); some->pop_back()) {
        completions[count++] = some->back();
      }
    }
    return count;
  }
  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

  void let_writes_go() {
    const std::lock_guard lock(mutex_);
    free_ = true;
    changed_.notify_all();
  }
  /// Until the device has so many writes.
  void wait_for_writes(std::size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT(
        changed_.wait_for(lock, std::chrono::seconds(60), [&] { return writes_.size() >= count; }));
  }
  std::size_t writes_max() {
    const std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Completion> writes_;
  std::vector<Completion> over_;
  std::size_t most_ = 0;
  bool free_ = false;
  bool woken_ = false;
};

struct HoldingBench {
  OneLane lane;
  HoldingEngine* engine = nullptr;  // the lane's

  HoldingBench() {
    auto own = std::make_unique<HoldingEngine>();
    engine = own.get();
    lane.start(std::move(own));
  }
  ~HoldingBench() {
    engine->let_writes_go();
    lane.wait_for_all();
  }
};

// Whatever waits for the device, and without any look at a clock: the writes end when the test
// says.
void a_read_is_over_beside_writes_that_do_not_end() {
  for (const std::size_t writes : {1, 14, 15, 16, 32, 60}) {
    HoldingBench bench;
    bench.lane.submit(Operation::kWrite, 0, writes);
    bench.engine->wait_for_writes(writes);
    for (std::uint64_t block = 100; block < 103; ++block) {
      bench.lane.wait_for(bench.lane.submit(Operation::kRead, block, 1, true));
      bench.lane.wait_for(bench.lane.submit(Operation::kRead, block + 50));
    }
  }
}

void writes_alone_fill_the_queue() {
  HoldingBench bench;
  bench.lane.submit(Operation::kWrite, 0, 2 * kDepth);
  bench.engine->wait_for_writes(kDepth);
}

void behind_a_needed_read_writes_fill_only_a_part_of_the_queue() {
  HoldingBench bench;
  bench.lane.wait_for(bench.lane.submit(Operation::kRead, 200, 1, true));
  bench.lane.submit(Operation::kWrite, 0, kDepth);
  for (std::uint64_t block = 201; block < 205; ++block) {
    bench.lane.wait_for(bench.lane.submit(Operation::kRead, block, 1, true));
  }
  MA_INVARIANT(bench.engine->writes_max() == kDepth / WriteLimit::kQueueShare);
}

// Writes that somebody waits for are not held back for reads.
void needed_writes_fill_the_queue_behind_a_needed_read() {
  HoldingBench bench;
  bench.lane.wait_for(bench.lane.submit(Operation::kRead, 200, 1, true));
  bench.lane.submit(Operation::kWrite, 0, kDepth, true);
  bench.engine->wait_for_writes(kDepth);
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::what_is_waited_for_goes_first_and_writes_last();
  memascend::a_write_is_not_passed_over_for_ever();
  memascend::direct_pieces_take_turns_with_bounced_ones();
  memascend::a_read_is_over_beside_writes_that_do_not_end();
  memascend::writes_alone_fill_the_queue();
  memascend::behind_a_needed_read_writes_fill_only_a_part_of_the_queue();
  memascend::needed_writes_fill_the_queue_behind_a_needed_read();
  return 0;
}

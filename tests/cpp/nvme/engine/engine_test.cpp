// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// Each engine alone, on a file of the current directory: no request is forgotten and no wake-up
// lost, however requests, completions and wake-ups meet. Runs for the seconds given (default 2 per
// engine); a lost wake-up is rare, so look for one with minutes, beside other work.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "nvme/engine/aio.hpp"
#include "nvme/engine/threads.hpp"
#include "nvme/engine/uring.hpp"

namespace memascend {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kDepth = 16;
constexpr std::size_t kBlockBytes = 4096;
constexpr std::chrono::seconds kPatience{20};  // a request on memory that takes longer is lost

alignas(4096) std::byte memory[kDepth * kBlockBytes];

// Bursts of every size, the engine idle or busy in between, so that its threads fall asleep and are
// woken at every point.
void every_request_is_answered(Engine& engine, Clock::time_point end) {
  std::mt19937_64 random(1);
  std::vector<Request> batch;
  std::vector<Completion> completions(kDepth);
  std::vector<std::uint64_t> idle_tags;
  for (std::uint64_t tag = 0; tag < kDepth; ++tag) idle_tags.push_back(tag);
  std::uint64_t total = 0;
  while (Clock::now() < end) {
    const std::size_t count = std::min<std::size_t>(idle_tags.size(), random() % 5);
    batch.clear();
    for (std::size_t index = 0; index < count; ++index) {
      const std::uint64_t tag = idle_tags.back();
      idle_tags.pop_back();
      batch.push_back({random() % 2 == 0 ? Operation::kRead : Operation::kWrite, tag * kBlockBytes,
                       kBlockBytes, memory + tag * kBlockBytes, tag});
    }
    if (!batch.empty()) engine.submit(batch);
    const std::size_t in_flight = kDepth - idle_tags.size();
    // Now and then all of them, so that the engine's threads have nothing left and sleep.
    std::size_t wanted = random() % 4 == 0 ? in_flight : std::min<std::size_t>(in_flight, 1);
    const auto start = Clock::now();
    while (wanted > 0) {
      const std::size_t got = engine.reap(completions, kPatience);
      for (std::size_t index = 0; index < got; ++index) {
        MA_INVARIANT(completions[index].result == kBlockBytes);
        idle_tags.push_back(completions[index].tag);
      }
      wanted -= std::min(wanted, got);
      total += got;
      if (got == 0 && Clock::now() - start >= kPatience) {
        std::printf("%s: %zu requests without an answer after %llu others\n", engine.name().c_str(),
                    kDepth - idle_tags.size(), static_cast<unsigned long long>(total));
        std::exit(1);
      }
    }
  }
  while (idle_tags.size() < kDepth) {
    const std::size_t got = engine.reap(completions, kPatience);
    for (std::size_t index = 0; index < got; ++index) idle_tags.push_back(completions[index].tag);
  }
  std::printf("%s: %llu requests\n", engine.name().c_str(), static_cast<unsigned long long>(total));
}

// Each wake() ends one wait: two threads play catch, one of them through the engine.
void every_wake_up_arrives(Engine& engine, Clock::time_point end) {
  std::atomic<std::uint64_t> sent = 0;
  std::atomic<std::uint64_t> seen = 0;
  std::atomic<bool> over = false;
  std::thread waker([&] {
    while (!over) {
      if (sent != seen) continue;
      ++sent;
      engine.wake();
    }
  });
  std::vector<Completion> completions(kDepth);
  while (Clock::now() < end) {
    const auto start = Clock::now();
    while (seen == sent) {
      engine.reap(completions, kPatience);
      MA_INVARIANT(Clock::now() - start < kPatience);
    }
    ++seen;
  }
  over = true;
  waker.join();
}

// One of a batch that the kernel does not take is answered as well, and so are those after it.
void a_request_that_is_refused_is_answered(Engine& engine) {
  std::vector<Request> batch;
  for (std::uint64_t tag = 0; tag < 3; ++tag) {
    batch.push_back({Operation::kRead, 0, kBlockBytes, memory + tag * kBlockBytes, tag});
  }
  batch[1].nbytes = UINT64_MAX;
  engine.submit(batch);
  std::vector<Completion> completions(kDepth);
  std::vector<std::int64_t> results(batch.size());
  for (std::size_t left = batch.size(); left > 0;) {
    const std::size_t got = engine.reap(completions, kPatience);
    MA_INVARIANT(got > 0);
    for (std::size_t index = 0; index < got; ++index) {
      results[completions[index].tag] = completions[index].result;
    }
    left -= got;
  }
  MA_INVARIANT(results[0] == kBlockBytes && results[2] == kBlockBytes);
  MA_INVARIANT(results[1] < 0);
}

template <typename EngineType>
void check(const EngineOptions& options, std::chrono::milliseconds duration) {
  // A file, where there is one to be had: what is asynchronous is so on a drive.
  Volume volume = Volume::open_anonymous(".");
  volume.grow(1 << 20);
  EngineType engine(options, volume);
  engine.start();
  every_request_is_answered(engine, Clock::now() + duration * 3 / 4);
  every_wake_up_arrives(engine, Clock::now() + duration / 4);
}

}  // namespace
}  // namespace memascend

int main(int argument_count, char** arguments) {
  using namespace memascend;
  const auto seconds = std::chrono::seconds(argument_count > 1 ? std::atoi(arguments[1]) : 2);
  EngineOptions options;
  options.queue_depth = kDepth;
  check<ThreadsEngine>(options, seconds);
  try {
    check<AioEngine>(options, seconds);
    const Volume volume = Volume::open_in_memory(1 << 20);
    AioEngine engine(options, volume);
    engine.start();
    MA_INVARIANT(::ftruncate(volume.descriptor(), 1 << 20) == 0);
    a_request_that_is_refused_is_answered(engine);
  } catch (const SystemCallError& error) {
    std::printf("without libaio: %s\n", error.what());
  }
  try {
    check<UringEngine>(options, seconds);
  } catch (const SystemCallError& error) {
    std::printf("without uring: %s\n", error.what());
  }
  return 0;
}

// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// The libaio engine where the kernel refuses its calls: the requests in question end with the
// errno, wake-ups are heard, and the process lives.
#include "nvme/engine/aio.hpp"

#include <sys/syscall.h>

#include <cstdio>
#include <thread>

#include "base/check.hpp"
#include "support/one_lane.hpp"
#include "support/system_calls.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{20'000};
constexpr std::size_t kBlockBytes = 4096;

alignas(4096) std::byte memory[kBlockBytes];

/// Calls with this number fail with `code`, `count` of them.
void refuse(long refused, int code, int count) {
  call_hook = [=, left = std::make_shared<std::atomic<int>>(count)](
                  long number, const CallArguments&) -> std::optional<long> {
    if (number != refused || *left == 0) return std::nullopt;
    --*left;
    return -code;
  };
}

std::int64_t read_one(AioEngine& engine) {
  const Request request{Operation::kRead, 0, kBlockBytes, memory, 7};
  engine.submit({&request, 1});
  Completion completion{};
  while (engine.reap({&completion, 1}, kPatience) == 0) {
  }
  EXPECT(completion.tag == 7);
  return completion.result;
}

void a_wake_up_is_heard(AioEngine& engine) {
  std::thread waker([&] { engine.wake(); });
  Completion completion{};
  const auto start = std::chrono::steady_clock::now();
  EXPECT(engine.reap({&completion, 1}, kPatience) == 0);
  EXPECT(std::chrono::steady_clock::now() - start < kPatience);
  waker.join();
}

void a_wake_up_is_heard_though_the_kernel_could_not_be_asked_for_it(AioEngine& engine) {
  a_wake_up_is_heard(engine);  // so that the next reap() asks
  refuse(SYS_io_submit, EAGAIN, 3);
  a_wake_up_is_heard(engine);
  call_hook = nullptr;
  EXPECT(read_one(engine) == kBlockBytes);
}

void without_results_every_request_ends_with_the_errno(AioEngine& engine) {
  refuse(SYS_io_getevents, EPERM, 1);
  EXPECT(read_one(engine) == -EPERM);
  call_hook = nullptr;
  EXPECT(read_one(engine) == -EPERM);
  a_wake_up_is_heard(engine);
}

void a_lane_fails_its_transfers_and_lives(long refused) {
  OneLane lane;
  lane.start(std::make_unique<AioEngine>(EngineOptions{}, lane.volume()));
  const Transfer* first = lane.submit(Operation::kRead, 0);
  lane.wait_for(first);
  lane.queue.reset();
  refuse(refused, EPERM, -1);
  if (refused == SYS_io_submit) {  // not even a start
    bool started = true;
    try {
      lane.start(std::make_unique<AioEngine>(EngineOptions{}, lane.volume()));
    } catch (const SystemCallError& error) {
      started = error.code() != EPERM;
    }
    EXPECT(!started);
  } else {
    lane.start(std::make_unique<AioEngine>(EngineOptions{}, lane.volume()));
    for (std::uint64_t block = 1; block < 4; ++block) {
      const Transfer* transfer = lane.submit(Operation::kRead, block);
      lane.wait_for(transfer);
      EXPECT(transfer->error && transfer->error->code == EPERM);
    }
  }
  lane.queue.reset();
  call_hook = nullptr;
}

}  // namespace
}  // namespace memascend

int main() {
  using namespace memascend;
  Volume volume = Volume::open_in_memory(1 << 20);
  volume.grow(1 << 20);
  try {
    AioEngine engine({}, volume);
    engine.start();
    a_wake_up_is_heard_though_the_kernel_could_not_be_asked_for_it(engine);
    without_results_every_request_ends_with_the_errno(engine);
  } catch (const SystemCallError& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  for (const long refused : {SYS_io_getevents, SYS_io_submit}) {
    a_lane_fails_its_transfers_and_lives(refused);
  }
  return 0;
}

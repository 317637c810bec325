// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// The uring engine where the kernel refuses its calls: whatever errno it is, the requests in
// question end with it, the engine goes on, and the process lives.
#include "nvme/engine/uring.hpp"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <thread>

#include "base/check.hpp"
#include "support/one_lane.hpp"
#include "support/system_calls.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{20'000};
constexpr std::size_t kBlockBytes = 4096;
constexpr std::uint64_t kCount = 4;

alignas(4096) std::byte memory[kCount * kBlockBytes];

/// io_uring_enter fails `count` times with `code`.
void refuse_enter(int code, int count) {
  call_hook = [code, left = std::make_shared<std::atomic<int>>(count)](
                  long number, const CallArguments&) -> std::optional<long> {
    if (number != SYS_io_uring_enter || *left == 0) return std::nullopt;
    --*left;
    return -code;
  };
}

Volume volume_of_blocks() {
  Volume volume = Volume::open_in_memory(1 << 20);
  volume.grow(1 << 20);
  return volume;
}

std::map<std::uint64_t, std::int64_t> read_all(UringEngine& engine) {
  std::vector<Request> batch;
  for (std::uint64_t tag = 0; tag < kCount; ++tag) {
    batch.push_back(
        {Operation::kRead, tag * kBlockBytes, kBlockBytes, memory + tag * kBlockBytes, tag});
  }
  engine.submit(batch);
  std::map<std::uint64_t, std::int64_t> results;
  std::vector<Completion> completions(3);  // fewer than there are
  while (results.size() < kCount) {
    const std::size_t count = engine.reap(completions, kPatience);
    for (std::size_t index = 0; index < count; ++index) {
      EXPECT(results.emplace(completions[index].tag, completions[index].result).second);
    }
  }
  return results;
}

std::size_t count_of(const std::map<std::uint64_t, std::int64_t>& results, std::int64_t wanted) {
  std::size_t count = 0;
  for (const auto& [tag, result] : results) count += result == wanted ? 1 : 0;
  return count;
}

void a_wake_up_is_heard(UringEngine& engine) {
  std::thread waker([&] { engine.wake(); });
  std::vector<Completion> completions(kCount);
  const auto start = std::chrono::steady_clock::now();
  EXPECT(engine.reap(completions, kPatience) == 0);
  EXPECT(std::chrono::steady_clock::now() - start < kPatience);
  waker.join();
}

EngineOptions few_options() {
  EngineOptions options;
  options.queue_depth = kCount;
  return options;
}

// io_uring counts the wake-up as one completion of those that a wait is for.
void a_wake_up_ends_a_wait_beside_requests_that_stay_in_flight() {
  int pair[2];
  EXPECT(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  const Volume volume = volume_of_blocks();
  EXPECT(::dup2(pair[0], volume.descriptor()) >= 0);
  EngineOptions options;
  options.queue_depth = 64;
  UringEngine engine(options, volume);
  engine.start();
  std::vector<Request> batch;
  for (std::uint64_t tag = 0; tag < 40; ++tag) {
    batch.push_back({Operation::kRead, 0, 1, memory + tag, tag});
  }
  engine.submit(batch);
  for (int turn = 0; turn < 3; ++turn) a_wake_up_is_heard(engine);
  const char bytes[40] = {};
  EXPECT(::write(pair[1], bytes, sizeof(bytes)) == sizeof(bytes));
  std::vector<Completion> completions(64);
  for (std::size_t left = batch.size(); left > 0;) left -= engine.reap(completions, kPatience);
  ::close(pair[0]);
  ::close(pair[1]);
}

void what_the_kernel_does_not_take_ends_with_its_errno() {
  const Volume volume = volume_of_blocks();
  for (const int code : {ENOMEM, EAGAIN, EBUSY, EPERM, EINVAL, EBADF}) {
    UringEngine engine(few_options(), volume);
    engine.start();
    EXPECT(count_of(read_all(engine), kBlockBytes) == kCount);
    refuse_enter(code, 1);
    EXPECT(count_of(read_all(engine), code == EBUSY ? -EAGAIN : -code) == kCount);
    EXPECT(count_of(read_all(engine), kBlockBytes) == kCount);
    a_wake_up_is_heard(engine);
    call_hook = nullptr;
  }
}

void a_wait_that_is_refused_loses_nothing() {
  const Volume volume = volume_of_blocks();
  UringEngine engine(few_options(), volume);
  engine.start();
  std::vector<Completion> completions(kCount);
  EXPECT(engine.reap(completions, milliseconds(0)) == 0);  // the wake request is taken
  refuse_enter(EBADR, 1);
  EXPECT(engine.reap(completions, milliseconds(1)) == 0);
  EXPECT(count_of(read_all(engine), kBlockBytes) == kCount);
  a_wake_up_is_heard(engine);
  call_hook = nullptr;
}

/// Drops one completion as a kernel without memory does, and counts it.
class DroppingKernel {
 public:
  DroppingKernel() {
    call_hook = [this](long number, const CallArguments& arguments) -> std::optional<long> {
      if (number == SYS_io_uring_setup) return setup(arguments);
      if (number == SYS_io_uring_enter) return enter(arguments);
      return std::nullopt;
    };
  }
  ~DroppingKernel() {
    call_hook = nullptr;
    ::munmap(queues_, kQueuesBytes);
  }
  void drop(std::uint64_t tag) { dropped_ = tag; }
  bool has_dropped() const { return !dropped_; }

 private:
  static constexpr std::size_t kQueuesBytes = 4096;

  std::optional<long> setup(const CallArguments& arguments) {
    const long ring = call_kernel(SYS_io_uring_setup, arguments);
    if (ring < 0) return -errno;
    offsets_ = reinterpret_cast<io_uring_params*>(arguments[1])->cq_off;
    queues_ = ::mmap(nullptr, kQueuesBytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                     static_cast<int>(ring), IORING_OFF_SQ_RING);
    EXPECT(queues_ != MAP_FAILED);
    return ring;
  }

  std::optional<long> enter(const CallArguments& arguments) {
    const long taken = call_kernel(SYS_io_uring_enter, arguments);
    const int code = errno;
    unsigned* head = word(offsets_.head);
    const auto entry = [&](unsigned place) {
      return reinterpret_cast<io_uring_cqe*>(word(offsets_.cqes)) +
             (place & *word(offsets_.ring_mask));
    };
    for (unsigned place = *head; dropped_ && place != *word(offsets_.tail); ++place) {
      if (entry(place)->user_data != *dropped_) continue;
      for (; place != *head; --place) *entry(place) = *entry(place - 1);
      ++*head;
      ++*word(offsets_.overflow);
      dropped_.reset();
    }
    return taken < 0 ? -code : taken;
  }

  unsigned* word(unsigned offset) const {
    return reinterpret_cast<unsigned*>(static_cast<char*>(queues_) + offset);
  }

  io_cqring_offsets offsets_{};
  void* queues_ = nullptr;
  std::optional<std::uint64_t> dropped_;
};

void a_request_whose_completion_is_dropped_ends_with_an_error_that_names_it() {
  const Volume volume = volume_of_blocks();
  for (std::uint64_t tag = 0; tag < kCount; ++tag) {
    DroppingKernel kernel;
    UringEngine engine(few_options(), volume);
    engine.start();
    EXPECT(count_of(read_all(engine), kBlockBytes) == kCount);
    kernel.drop(tag);
    const auto results = read_all(engine);
    EXPECT(kernel.has_dropped());
    EXPECT(count_of(results, -EBADR) == 1 && results.at(tag) == -EBADR);
    EXPECT(count_of(results, kBlockBytes) == kCount - 1);
    EXPECT(count_of(read_all(engine), kBlockBytes) == kCount);
    a_wake_up_is_heard(engine);
  }
}

void a_wake_up_whose_completion_is_dropped_is_asked_for_again() {
  const Volume volume = volume_of_blocks();
  DroppingKernel kernel;
  UringEngine engine(few_options(), volume);
  engine.start();
  std::vector<Completion> completions(kCount);
  EXPECT(engine.reap(completions, milliseconds(0)) == 0);
  kernel.drop(UINT64_MAX);  // of the read of the event counter
  engine.wake();
  while (!kernel.has_dropped()) EXPECT(engine.reap(completions, kPatience) == 0);
  EXPECT(engine.reap(completions, milliseconds(0)) == 0);
  a_wake_up_is_heard(engine);
  EXPECT(count_of(read_all(engine), kBlockBytes) == kCount);
}

void a_lane_asks_again_where_the_kernel_has_no_memory_for_a_moment() {
  for (const int code : {ENOMEM, EAGAIN, EBUSY}) {
    OneLane lane;
    refuse_enter(code, 2);
    lane.start(std::make_unique<UringEngine>(EngineOptions{}, lane.volume()));
    const Transfer* transfer = lane.submit(Operation::kWrite, 0, kCount);
    lane.wait_for(transfer);
    EXPECT(!transfer->error);
    lane.queue.reset();
    call_hook = nullptr;
  }
}

void a_lane_fails_transfers_that_the_kernel_refuses_and_lives() {
  for (const int code : {ENOMEM, EPERM}) {
    OneLane lane;
    refuse_enter(code, -1);
    TransferOptions options;
    options.again_limit = milliseconds(20);
    lane.start(std::make_unique<UringEngine>(EngineOptions{}, lane.volume()), options);
    for (std::uint64_t block = 0; block < 3; ++block) {
      const Transfer* transfer = lane.submit(Operation::kRead, block);
      lane.wait_for(transfer);
      EXPECT(transfer->error && transfer->error->code == code);
    }
    lane.queue.reset();
    call_hook = nullptr;
  }
}

}  // namespace
}  // namespace memascend

int main() {
  using namespace memascend;
  try {
    Ring probe(1);
  } catch (const SystemCallError& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  a_wake_up_ends_a_wait_beside_requests_that_stay_in_flight();
  what_the_kernel_does_not_take_ends_with_its_errno();
  a_wait_that_is_refused_loses_nothing();
  a_request_whose_completion_is_dropped_ends_with_an_error_that_names_it();
  a_wake_up_whose_completion_is_dropped_is_asked_for_again();
  a_lane_asks_again_where_the_kernel_has_no_memory_for_a_moment();
  a_lane_fails_transfers_that_the_kernel_refuses_and_lives();
  return 0;
}

#include "nvme/engine/uring.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeTag = UINT64_MAX;

}  // namespace

UringEngine::UringEngine(const EngineOptions& options, const Volume& volume)
    : options_(options),
      ring_({.entry_count = static_cast<unsigned>(options.queue_depth) + 1,  // 1: the wake request
             .kernel_polls = options.sqpoll,
             .device_polled = options.iopoll}),
      file_(volume.descriptor()) {
  wake_descriptor_ =
      PrivateDescriptor(static_cast<int>(MA_SYSCALL(::eventfd(0, EFD_CLOEXEC), "eventfd")));
}

UringEngine::~UringEngine() {
  // Closing the ring would not wait, and the kernel would go on writing into the caller's memory.
  try {
    Completion completion{};
    while (in_flight_count_ > 0) reap({&completion, 1}, 1, std::chrono::seconds(1));
    wake();  // the kernel must not write to the counter's place any more
    while (wake_armed_) reap({&completion, 1}, 1, std::chrono::seconds(1));
  } catch (const SystemCallError& error) {
    std::fprintf(stderr, "memascend: requests left in an io_uring: %s\n", error.what());
  }
  // The kernel tears a ring down some time after its close; the file goes now.
  if (file_registered_) ring_.register_resource(uring::kUnregisterFiles, nullptr, 0);
}

std::string UringEngine::description() const {
  return join("io_uring, ", ring_.mode(), ", depth ", options_.queue_depth,
              file_registered_ ? ", registered file" : "");
}

void UringEngine::start() {
  file_registered_ = ring_.register_resource(uring::kRegisterFiles, &file_, 1) == 0;
  ring_.start();
}

void UringEngine::submit(std::span<const Request> requests) {
  for (const Request& request : requests) prepare(request);
  in_flight_count_ += requests.size();
  // reap() follows and hands them over in the system call that it needs anyway.
}

// The ring has a place for every request in flight, but a kernel thread (SQPOLL) may be slow to
// take what was answered long ago.
io_uring_sqe* UringEngine::next_entry() {
  io_uring_sqe* entry = ring_.next_submission();
  while (entry == nullptr) {
    ring_.wait_for_room();
    entry = ring_.next_submission();
  }
  return entry;
}

void UringEngine::prepare(const Request& request) {
  io_uring_sqe* entry = next_entry();
  entry->opcode = request.operation == Operation::kRead ? IORING_OP_READ : IORING_OP_WRITE;
  entry->fd = file_registered_ ? 0 : file_;  // 0: the first registered one
  entry->flags = file_registered_ ? IOSQE_FIXED_FILE : 0;
  entry->off = request.offset;
  entry->addr = reinterpret_cast<std::uint64_t>(request.data);
  entry->len = static_cast<std::uint32_t>(request.nbytes);
  entry->user_data = request.tag;
}

std::size_t UringEngine::reap(std::span<Completion> completions, std::size_t count_min,
                              std::chrono::milliseconds timeout) {
  if (options_.iopoll) return reap_polled(completions, count_min, timeout);
  if (!wake_armed_) arm_wake();
  ring_.enter(static_cast<unsigned>(count_min), timeout);
  return take_completions(completions);
}

// A polled ring takes no read of an event counter, and its waits know neither timeouts nor wakes:
// so poll, and look at the event counter and the clock in between.
std::size_t UringEngine::reap_polled(std::span<Completion> completions, std::size_t count_min,
                                     std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    ring_.enter(0, std::chrono::milliseconds(0));
    const std::size_t count = take_completions(completions);
    if (count > 0 || count_min == 0) return count;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return 0;
    // With nothing to poll for it is the counter alone that matters.
    if (wait_for_wake(in_flight_count_ == 0 ? left : std::chrono::milliseconds(0))) return 0;
  }
}

std::size_t UringEngine::take_completions(std::span<Completion> completions) {
  std::size_t count = 0;
  io_uring_cqe entry;
  while (count < completions.size() && ring_.next_completion(&entry)) {
    if (entry.user_data == kWakeTag) {
      wake_armed_ = false;
      continue;
    }
    completions[count++] = {entry.user_data, entry.res};
    --in_flight_count_;
  }
  return count;
}

void UringEngine::arm_wake() {
  io_uring_sqe* entry = next_entry();
  entry->opcode = IORING_OP_READ;
  entry->fd = wake_descriptor_.get();
  entry->addr = reinterpret_cast<std::uint64_t>(&wake_value_);
  entry->len = sizeof(wake_value_);
  entry->user_data = kWakeTag;
  wake_armed_ = true;
}

bool UringEngine::wait_for_wake(std::chrono::milliseconds timeout) {
  pollfd event{wake_descriptor_.get(), POLLIN, 0};
  if (::poll(&event, 1, static_cast<int>(timeout.count())) <= 0) return false;
  (void)!::read(wake_descriptor_.get(), &wake_value_, sizeof(wake_value_));
  return true;
}

void UringEngine::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_descriptor_.get(), &one, sizeof(one));
}

}  // namespace memascend

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
  wake_descriptor_ = static_cast<int>(MA_SYSCALL(::eventfd(0, EFD_CLOEXEC), "eventfd"));
}

UringEngine::~UringEngine() {
  // Closing the ring would not wait, and the kernel would go on writing into the caller's memory.
  try {
    Completion completion{};
    while (in_flight_count_ > 0) reap({&completion, 1}, 1, std::chrono::seconds(1));
  } catch (const SystemCallError& error) {
    std::fprintf(stderr, "memascend: requests left in an io_uring: %s\n", error.what());
  }
  // The kernel tears a ring down some time after its close; the file goes now.
  if (file_registered_) ring_.register_resource(uring::kUnregisterFiles, nullptr, 0);
  ::close(wake_descriptor_);
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

void UringEngine::prepare(const Request& request) {
  io_uring_sqe* entry = ring_.next_submission();
  MA_INVARIANT(entry != nullptr);  // the ring has a place for every request in flight
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
  if (options_.iopoll) {
    // A polled ring takes no read of an event counter: with nothing to poll for, wait beside it.
    if (in_flight_count_ == 0 && count_min > 0) wait_for_wake(timeout);
    count_min = std::min(count_min, in_flight_count_);
  } else if (!wake_armed_) {
    arm_wake();
  }
  ring_.enter(static_cast<unsigned>(count_min), timeout);
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
  io_uring_sqe* entry = ring_.next_submission();
  MA_INVARIANT(entry != nullptr);
  entry->opcode = IORING_OP_READ;
  entry->fd = wake_descriptor_;
  entry->addr = reinterpret_cast<std::uint64_t>(&wake_value_);
  entry->len = sizeof(wake_value_);
  entry->user_data = kWakeTag;
  wake_armed_ = true;
}

void UringEngine::wait_for_wake(std::chrono::milliseconds timeout) {
  pollfd event{wake_descriptor_, POLLIN, 0};
  if (::poll(&event, 1, static_cast<int>(timeout.count())) > 0) {
    (void)!::read(wake_descriptor_, &wake_value_, sizeof(wake_value_));
  }
}

void UringEngine::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_descriptor_, &one, sizeof(one));
}

}  // namespace memascend

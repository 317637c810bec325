#include "nvme/engine/uring.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <thread>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeTag = UINT64_MAX;
// After so many consecutive failed system calls a ring is closed with requests in it.
constexpr unsigned kRefusalCountMax = 1000;

}  // namespace

UringEngine::UringEngine(const EngineOptions& options, const Volume& volume)
    : options_(options),
      ring_(static_cast<unsigned>(options.queue_depth) + 1),  // + 1 for the wake request
      file_(volume.descriptor()) {
  in_flight_.reserve(options.queue_depth);
  refused_.reserve(options.queue_depth);
  wake_descriptor_ =
      PrivateDescriptor(static_cast<int>(MA_SYSCALL(::eventfd(0, EFD_CLOEXEC), "eventfd")));
}

UringEngine::~UringEngine() {
  // Closing the ring would not wait, and the kernel would still write into the caller's memory.
  Completion completion{};
  const auto reaps = [&] {
    reap({&completion, 1}, std::chrono::seconds(1));
    return refusal_count_ < kRefusalCountMax;
  };
  while (!in_flight_.empty() && reaps()) {
  }
  wake();  // the kernel must no longer write to wake_value_
  while (wake_armed_ && reaps()) {
  }
  if (!in_flight_.empty()) {
    std::fprintf(stderr, "memascend: %zu requests left in an io_uring that the kernel refuses\n",
                 in_flight_.size());
  }
  // The kernel tears a ring down some time after its close; release the file now.
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
  for (const Request& request : requests) {
    // While completions are missing no request begins, so that find_lost() can tell which are lost.
    if (lost_count() > 0) {
      refused_.push_back({request.tag, -EAGAIN});
    } else {
      prepare(request);
    }
  }
  // reap() follows and submits the entries in the system call that it needs anyway.
}

void UringEngine::prepare(const Request& request) {
  io_uring_sqe* entry = ring_.next_submission();
  entry->opcode = request.operation == Operation::kRead ? IORING_OP_READ : IORING_OP_WRITE;
  entry->fd = file_registered_ ? 0 : file_;  // 0: index of the registered file
  entry->flags = file_registered_ ? IOSQE_FIXED_FILE : 0;
  entry->off = request.offset;
  entry->addr = reinterpret_cast<std::uint64_t>(request.data);
  entry->len = static_cast<std::uint32_t>(request.nbytes);
  entry->user_data = request.tag;
  in_flight_.push_back(request.tag);
}

std::size_t UringEngine::reap(std::span<Completion> completions,
                              std::chrono::milliseconds timeout) {
  find_lost();
  if (!refused_.empty()) timeout = std::chrono::milliseconds(0);
  if (!wake_armed_ && lost_count() == 0) arm_wake();
  enter(timeout.count() > 0 ? 1 : 0, timeout);
  return take_completions(completions);
}

// Submits the prepared entries and waits. An errno becomes the result of the entries that the
// kernel did not take: the lane retries or reports them.
bool UringEngine::enter(unsigned complete_min, std::chrono::milliseconds timeout) {
  const int code = ring_.enter(complete_min, timeout);
  refusal_count_ = code == 0 ? 0 : refusal_count_ + 1;
  if (code == 0) return true;
  while (const std::optional<std::uint64_t> tag = ring_.withdraw()) {
    if (*tag == kWakeTag) {
      wake_armed_ = false;
      continue;
    }
    std::erase(in_flight_, *tag);
    refused_.push_back({*tag, code == EBUSY ? -EAGAIN : -code});
  }
  if (refused_.empty()) std::this_thread::sleep_for(std::min(timeout, kRefusalPause));
  return false;
}

std::size_t UringEngine::lost_count() const noexcept {
  return ring_.dropped_count() - lost_found_count_;
}

// A kernel short of memory may drop completions: it counts them, and a wait returns EBADR. Which
// requests were lost is known once no others are in flight.
void UringEngine::find_lost() {
  const std::size_t count = lost_count();
  if (count == 0) return;
  if (in_flight_.size() + (wake_armed_ ? 1 : 0) > count) {
    if (wake_armed_) wake();  // ends the read of the event counter, too, unless it is lost
    return;
  }
  for (const std::uint64_t tag : in_flight_) refused_.push_back({tag, -EBADR});
  in_flight_.clear();
  wake_armed_ = false;
  lost_found_count_ += static_cast<unsigned>(count);
}

std::size_t UringEngine::take_completions(std::span<Completion> completions) {
  std::size_t count = 0;
  for (; count < completions.size() && !refused_.empty(); refused_.pop_back()) {
    completions[count++] = refused_.back();
  }
  io_uring_cqe entry;
  while (count < completions.size() && ring_.next_completion(&entry)) {
    if (entry.user_data == kWakeTag) {
      wake_armed_ = false;
      continue;
    }
    completions[count++] = {entry.user_data, entry.res};
    std::erase(in_flight_, entry.user_data);
  }
  return count;
}

void UringEngine::arm_wake() {
  io_uring_sqe* entry = ring_.next_submission();
  entry->opcode = IORING_OP_READ;
  entry->fd = wake_descriptor_.get();
  entry->addr = reinterpret_cast<std::uint64_t>(&wake_value_);
  entry->len = sizeof(wake_value_);
  entry->user_data = kWakeTag;
  wake_armed_ = true;
}

void UringEngine::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_descriptor_.get(), &one, sizeof(one));
}

}  // namespace memascend

#include "nvme/engine/aio.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeTag = UINT64_MAX;
constexpr std::uint16_t kPoll = 5;  // IOCB_CMD_POLL, Linux 4.18; missing in older headers

}  // namespace

AioEngine::AioEngine(const EngineOptions& options, const Volume& volume)
    : options_(options), file_(volume.descriptor()) {
  const std::size_t count = options_.queue_depth + 1;  // 1: the wake request
  blocks_.resize(count);
  block_pointers_.reserve(count);
  events_.resize(count);
  refused_.reserve(count);
  wake_descriptor_ = PrivateDescriptor(
      static_cast<int>(MA_SYSCALL(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")));
  MA_SYSCALL(::syscall(SYS_io_setup, static_cast<unsigned>(count), &context_), "io_setup");
}

AioEngine::~AioEngine() {
  (void)::syscall(SYS_io_destroy, context_);  // returns when nothing is in flight
}

std::string AioEngine::description() const { return join("libaio, depth ", options_.queue_depth); }

void AioEngine::submit(std::span<const Request> requests) {
  block_pointers_.clear();
  for (std::size_t index = 0; index < requests.size(); ++index) {
    const Request& request = requests[index];
    iocb& block = blocks_[index];
    block = {};
    block.aio_data = request.tag;
    block.aio_lio_opcode = request.operation == Operation::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    block.aio_fildes = static_cast<std::uint32_t>(file_);
    block.aio_buf = reinterpret_cast<std::uint64_t>(request.data);
    block.aio_nbytes = request.nbytes;
    block.aio_offset = static_cast<std::int64_t>(request.offset);
    block_pointers_.push_back(&block);
  }
  std::size_t taken = 0;
  while (taken < requests.size()) {
    const long count =
        ::syscall(SYS_io_submit, context_, requests.size() - taken, block_pointers_.data() + taken);
    if (count > 0) {
      taken += static_cast<std::size_t>(count);
      continue;
    }
    // About the first of those left: the lane asks again, or reports it.
    refused_.push_back({requests[taken].tag, count == 0 ? -EAGAIN : -errno});
    ++taken;
  }
}

std::size_t AioEngine::reap(std::span<Completion> completions, std::size_t count_min,
                            std::chrono::milliseconds timeout) {
  std::size_t count = std::min(completions.size(), refused_.size());
  std::copy_n(refused_.begin(), count, completions.begin());
  refused_.erase(refused_.begin(), refused_.begin() + static_cast<std::ptrdiff_t>(count));
  if (count == completions.size()) return count;
  if (!wake_armed_) arm_wake();
  if (count > 0) count_min = 0;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec patience{seconds.count(), std::chrono::nanoseconds(timeout - seconds).count()};
  const std::size_t room = std::min(events_.size(), completions.size() - count);
  const long found = ::syscall(SYS_io_getevents, context_, static_cast<long>(count_min),
                               static_cast<long>(room), events_.data(), &patience);
  if (found < 0 && errno != EINTR) throw SystemCallError(errno, "io_getevents");
  for (long index = 0; index < found; ++index) {
    const io_event& event = events_[static_cast<std::size_t>(index)];
    if (event.data == kWakeTag) {
      std::uint64_t value = 0;
      (void)!::read(wake_descriptor_.get(), &value, sizeof(value));
      wake_armed_ = false;
      continue;
    }
    completions[count++] = {event.data, event.res};
  }
  return count;
}

void AioEngine::arm_wake() {
  iocb block{};
  block.aio_data = kWakeTag;
  block.aio_lio_opcode = kPoll;
  block.aio_fildes = static_cast<std::uint32_t>(wake_descriptor_.get());
  block.aio_buf = POLLIN;
  iocb* pointer = &block;
  MA_SYSCALL(::syscall(SYS_io_submit, context_, 1L, &pointer), "poll by io_submit");
  wake_armed_ = true;
}

void AioEngine::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_descriptor_.get(), &one, sizeof(one));
}

}  // namespace memascend

#include "nvme/engine/aio.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <thread>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeTag = UINT64_MAX;
constexpr std::uint16_t kPoll = 5;  // IOCB_CMD_POLL, Linux 4.18; missing in older headers

}  // namespace

AioEngine::AioEngine(const EngineOptions& options, const Volume& volume)
    : options_(options), file_(volume.descriptor()) {
  const std::size_t count = options_.queue_depth + 1;  // + 1 for the wake request
  blocks_.resize(count);
  block_pointers_.reserve(count);
  events_.resize(count);
  refused_.reserve(count);
  in_flight_.reserve(count);
  wake_descriptor_ = PrivateDescriptor(
      static_cast<int>(MA_SYSCALL(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")));
  MA_SYSCALL(::syscall(SYS_io_setup, static_cast<unsigned>(count), &context_), "io_setup");
}

AioEngine::~AioEngine() {
  // Returns when nothing is in flight.
  if (broken_code_ == 0) (void)::syscall(SYS_io_destroy, context_);
}

std::string AioEngine::description() const { return join("libaio, depth ", options_.queue_depth); }

void AioEngine::start() {
  if (!arm_wake()) throw SystemCallError(errno, "poll by io_submit");
}

void AioEngine::submit(std::span<const Request> requests) {
  if (broken_code_ != 0) {
    for (const Request& request : requests) refused_.push_back({request.tag, -broken_code_});
    return;
  }
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
    for (long left = count; left > 0; --left) in_flight_.push_back(requests[taken++].tag);
    if (count > 0) continue;
    // The error is about the first remaining request: the lane retries or reports it.
    refused_.push_back({requests[taken].tag, count == 0 ? -EAGAIN : -errno});
    ++taken;
  }
}

std::size_t AioEngine::reap(std::span<Completion> completions, std::chrono::milliseconds timeout) {
  std::size_t count = std::min(completions.size(), refused_.size());
  std::copy_n(refused_.begin(), count, completions.begin());
  refused_.erase(refused_.begin(), refused_.begin() + static_cast<std::ptrdiff_t>(count));
  if (count == completions.size()) return count;
  if (count > 0) timeout = std::chrono::milliseconds(0);
  if (broken_code_ != 0) {
    wait_for_wake(timeout);
    return count;
  }
  // While the kernel lacks the memory to poll for wakes, check at short intervals.
  if (!wake_armed_ && !arm_wake()) timeout = std::min(timeout, kRefusalPause);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec patience{seconds.count(), std::chrono::nanoseconds(timeout - seconds).count()};
  const std::size_t room = std::min(events_.size(), completions.size() - count);
  const long found = ::syscall(SYS_io_getevents, context_, timeout.count() > 0 ? 1L : 0L,
                               static_cast<long>(room), events_.data(), &patience);
  if (found < 0 && errno != EINTR) give_up(errno);
  for (long index = 0; index < found; ++index) {
    const io_event& event = events_[static_cast<std::size_t>(index)];
    if (event.data == kWakeTag) {
      wait_for_wake(std::chrono::milliseconds(0));
      wake_armed_ = false;
      continue;
    }
    completions[count++] = {event.data, event.res};
    std::erase(in_flight_, event.data);
  }
  return count;
}

// Results can no longer be read. io_destroy returns after the requests in flight have ended, so
// their memory is no longer used; their outcome is unknown.
void AioEngine::give_up(int code) {
  if (::syscall(SYS_io_destroy, context_) != 0) {  // failed too: the watchdog reports the silence
    std::this_thread::sleep_for(kRefusalPause);
    return;
  }
  broken_code_ = code;
  for (const std::uint64_t tag : in_flight_) refused_.push_back({tag, -code});
  in_flight_.clear();
}

bool AioEngine::arm_wake() {
  iocb block{};
  block.aio_data = kWakeTag;
  block.aio_lio_opcode = kPoll;
  block.aio_fildes = static_cast<std::uint32_t>(wake_descriptor_.get());
  block.aio_buf = POLLIN;
  iocb* pointer = &block;
  wake_armed_ = ::syscall(SYS_io_submit, context_, 1L, &pointer) == 1;
  return wake_armed_;
}

void AioEngine::wait_for_wake(std::chrono::milliseconds timeout) {
  pollfd event{wake_descriptor_.get(), POLLIN, 0};
  if (::poll(&event, 1, static_cast<int>(timeout.count())) <= 0) return;
  std::uint64_t value = 0;
  (void)!::read(wake_descriptor_.get(), &value, sizeof(value));
}

void AioEngine::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_descriptor_.get(), &one, sizeof(one));
}

}  // namespace memascend

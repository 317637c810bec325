#include "nvme/engine/ring.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cstring>

#include "base/check.hpp"

namespace memascend {
namespace {

// The indices of the queues are shared with the kernel: each side publishes with release and reads
// with acquire, as in liburing's queue.c.
unsigned load_acquire(unsigned* shared) {
  return std::atomic_ref<unsigned>(*shared).load(std::memory_order_acquire);
}

void store_release(unsigned* shared, unsigned value) {
  std::atomic_ref<unsigned>(*shared).store(value, std::memory_order_release);
}

struct Mode {
  unsigned flags;
  const char* name;
};

// Best first; a kernel that does not know a flag returns EINVAL, and the next mode is tried.
constexpr Mode kModes[] = {
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "deferred completions"},
    {IORING_SETUP_COOP_TASKRUN, "cooperative completions"},
    {0, "plain completions"}};

constexpr unsigned kNeededFeatures =
    IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;

}  // namespace

Ring::Ring(unsigned entry_count) {
  io_uring_params parameters{};
  for (const Mode& mode : kModes) {
    parameters = {};
    parameters.flags = mode.flags | IORING_SETUP_R_DISABLED;
    mode_ = mode.name;
    descriptor_ = PrivateDescriptor(uring::setup(entry_count, &parameters));
    if (descriptor_.get() >= 0 || errno != EINVAL) break;
  }
  MA_SYSCALL(descriptor_.get(), "io_uring_setup(entries=", entry_count, ")");
  if ((parameters.features & kNeededFeatures) != kNeededFeatures) {
    throw SystemCallError(ENOSYS, "io_uring of this kernel lacks timed waits (Linux 5.11)");
  }
  try {
    map(parameters);
  } catch (...) {
    if (queues_ != nullptr) ::munmap(queues_, queues_bytes_);
    throw;
  }
}

void Ring::map(const io_uring_params& parameters) {
  const std::size_t submissions_end =
      parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
  const std::size_t completions_end =
      parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
  queues_bytes_ = submissions_end > completions_end ? submissions_end : completions_end;
  entries_bytes_ = parameters.sq_entries * sizeof(io_uring_sqe);
  const auto map_at = [&](std::size_t nbytes, unsigned long long offset) {
    void* address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                           descriptor_.get(), static_cast<off_t>(offset));
    MA_SYSCALL(address == MAP_FAILED ? -1 : 0, "map ", nbytes, " bytes of an io_uring");
    (void)::madvise(address, nbytes, MADV_DONTFORK);  // a child's mapping would keep the ring alive
    return static_cast<std::byte*>(address);
  };
  queues_ = map_at(queues_bytes_, IORING_OFF_SQ_RING);
  entries_ = reinterpret_cast<io_uring_sqe*>(map_at(entries_bytes_, IORING_OFF_SQES));

  const auto word = [&](std::uint32_t offset) {
    return reinterpret_cast<unsigned*>(queues_ + offset);
  };
  submission_head_ = word(parameters.sq_off.head);
  submission_tail_ = word(parameters.sq_off.tail);
  submission_mask_ = *word(parameters.sq_off.ring_mask);
  submission_count_ = parameters.sq_entries;
  prepared_tail_ = *submission_tail_;
  completion_head_ = word(parameters.cq_off.head);
  completion_tail_ = word(parameters.cq_off.tail);
  completion_overflow_ = word(parameters.cq_off.overflow);
  completion_mask_ = *word(parameters.cq_off.ring_mask);
  completions_ = reinterpret_cast<io_uring_cqe*>(queues_ + parameters.cq_off.cqes);
  // The indirection from queue place to entry is not used: place i always holds entry i.
  unsigned* places = word(parameters.sq_off.array);
  for (unsigned index = 0; index < parameters.sq_entries; ++index) places[index] = index;
}

Ring::~Ring() {
  ::munmap(entries_, entries_bytes_);
  ::munmap(queues_, queues_bytes_);
}

void Ring::start() {
  const int result = register_resource(uring::kRegisterEnableRings, nullptr, 0);
  if (result < 0) throw SystemCallError(-result, "enable an io_uring");
}

io_uring_sqe* Ring::next_submission() noexcept {
  MA_INVARIANT(prepared_tail_ - load_acquire(submission_head_) < submission_count_);
  io_uring_sqe* entry = &entries_[prepared_tail_ & submission_mask_];
  ++prepared_tail_;
  std::memset(entry, 0, sizeof(*entry));
  return entry;
}

int Ring::enter(unsigned complete_min, std::chrono::milliseconds timeout) {
  store_release(submission_tail_, prepared_tail_);
  for (;;) {
    const unsigned submit_count = prepared_tail_ - load_acquire(submission_head_);
    const int taken = enter_once(submit_count, complete_min, timeout);
    if (taken < 0) return -taken;
    if (static_cast<unsigned>(taken) == submit_count) return 0;
    // The kernel took only a part, and did not wait.
  }
}

// Returns the number of submissions taken, or -errno.
int Ring::enter_once(unsigned submit_count, unsigned complete_min,
                     std::chrono::milliseconds timeout) {
  constexpr unsigned flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
  const uring::Timespec timespec{timeout.count() / 1000, timeout.count() % 1000 * 1'000'000};
  const uring::WaitArgument argument{0, 0, 0, reinterpret_cast<std::uint64_t>(&timespec)};
  const int taken = uring::enter(descriptor_.get(), submit_count, complete_min, flags, &argument,
                                 sizeof(argument));
  if (taken >= 0) return taken;
  // The wait ended early. A call that has taken submissions returns their number instead of an
  // error.
  return errno == ETIME || errno == EINTR ? static_cast<int>(submit_count) : -errno;
}

std::optional<std::uint64_t> Ring::withdraw() noexcept {
  if (prepared_tail_ == load_acquire(submission_head_)) return std::nullopt;
  store_release(submission_tail_, --prepared_tail_);
  return entries_[prepared_tail_ & submission_mask_].user_data;
}

unsigned Ring::dropped_count() const noexcept { return load_acquire(completion_overflow_); }

bool Ring::next_completion(io_uring_cqe* completion) noexcept {
  const unsigned head = *completion_head_;
  if (head == load_acquire(completion_tail_)) return false;
  std::memcpy(completion, &completions_[head & completion_mask_], sizeof(*completion));
  store_release(completion_head_, head + 1);
  return true;
}

int Ring::register_resource(unsigned opcode, const void* argument, unsigned count) const noexcept {
  const int result = uring::do_register(descriptor_.get(), opcode, argument, count);
  return result < 0 ? -errno : 0;
}

}  // namespace memascend

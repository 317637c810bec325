#include "nvme/engine/memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {

MemoryEngine::MemoryEngine(const EngineOptions& options, const Volume& volume)
    : options_(options),
      faults_(*options_.faults),
      file_(volume.descriptor()),
      alignment_(volume.alignment()),
      random_(faults_.seed + static_cast<std::uint64_t>(options.volume_index)) {}

std::string MemoryEngine::description() const {
  return join("RAM with faults of seed ", faults_.seed, ", depth ", options_.queue_depth);
}

void MemoryEngine::submit(std::span<const Request> requests) {
  for (const Request& request : requests) in_flight_.push_back({request, next_end()});
  MA_INVARIANT(in_flight_.size() <= options_.queue_depth);
}

std::size_t MemoryEngine::reap(std::span<Completion> completions,
                               std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::size_t count = 0;
  while (count < completions.size()) {
    const std::size_t candidates = ready_count();
    if (candidates == 0 || happens(faults_.delay, &faults_.counts.delay)) {
      // Polled, since clearing the paused flag notifies no thread; fast enough for tests.
      const bool over = std::chrono::steady_clock::now() >= deadline;
      if (count > 0 || over || wait(std::chrono::milliseconds(1))) break;
      continue;
    }
    std::size_t index = 0;
    if (happens(faults_.reorder, &faults_.counts.reorder)) index = random_() % candidates;
    const Request request = in_flight_[index].request;
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
    completions[count++] = {request.tag, run(request)};
  }
  return count;
}

// Returns how many of the requests in flight, oldest first, may complete.
std::size_t MemoryEngine::ready_count() const {
  if (faults_.paused || faults_.paused_volume == options_.volume_index) return 0;
  if (!is_slow()) return in_flight_.size();
  const Time now = std::chrono::steady_clock::now();
  const auto first_running = std::find_if(in_flight_.begin(), in_flight_.end(),
                                          [now](const InFlight& one) { return one.end > now; });
  return static_cast<std::size_t>(first_running - in_flight_.begin());
}

bool MemoryEngine::is_slow() const {
  const int volume = faults_.slow_volume;
  return volume == options_.volume_index || volume == MemoryFaults::kEveryVolume;
}

// Returns when a request that is submitted now ends: it begins once one of those before it is over.
MemoryEngine::Time MemoryEngine::next_end() {
  if (!is_slow()) return {};
  busy_until_.resize(static_cast<std::size_t>(std::max(1, faults_.slow_width.load())));
  Time& first_free = *std::min_element(busy_until_.begin(), busy_until_.end());
  const Time begin = std::max(first_free, std::chrono::steady_clock::now());
  first_free = begin + std::chrono::milliseconds(faults_.slow_milliseconds.load());
  return first_free;
}

bool MemoryEngine::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, timeout, [this] { return woken_; });
  return std::exchange(woken_, false);
}

void MemoryEngine::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  wake_.notify_one();
}

bool MemoryEngine::happens(double probability, std::atomic<std::uint64_t>* count) {
  if (probability <= 0) return false;
  if (std::uniform_real_distribution<double>(0, 1)(random_) >= probability) return false;
  if (count != nullptr) ++*count;
  return true;
}

std::int64_t MemoryEngine::run(const Request& request) {
  if (!is_aligned(request.offset | request.nbytes, alignment_.offset_bytes)) return -EINVAL;
  if (!is_aligned(request.data, alignment_.memory_bytes)) return -EINVAL;
  const bool writes = request.operation == Operation::kWrite;
  MemoryFaultCounts& counts = faults_.counts;
  if (faults_.gone != 0) return -faults_.gone;
  if (happens(faults_.again, &counts.again)) return happens(0.5) ? -EAGAIN : -EINTR;
  if (happens(faults_.eio, &counts.eio)) return -EIO;
  if (writes && happens(faults_.enospc, &counts.enospc)) return -ENOSPC;
  std::uint64_t nbytes = request.nbytes;
  if (happens(faults_.short_transfer, &counts.short_transfer)) nbytes = 1 + random_() % nbytes;
  if (writes && happens(faults_.lost, &counts.lost)) return static_cast<std::int64_t>(nbytes);
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = writes ? ::pwrite(file_, request.data, nbytes, offset)
                               : ::pread(file_, request.data, nbytes, offset);
  if (moved < 0) return -errno;
  if (writes || moved == 0) return moved;
  if (flipped_.erase(request.offset) == 0 && happens(faults_.flip, &counts.flip)) {
    flipped_.insert(request.offset);
    const std::uint64_t bit = random_() % (static_cast<std::uint64_t>(moved) * 8);
    request.data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  return moved;
}

}  // namespace memascend

#include "nvme/engine/memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {

MemoryEngine::MemoryEngine(std::shared_ptr<MemoryFaults> faults, std::size_t queue_depth)
    : faults_(std::move(faults)), queue_depth_(queue_depth), random_(faults_->seed) {}

std::string MemoryEngine::description() const {
  return join("RAM with faults of seed ", faults_->seed, ", depth ", queue_depth_);
}

int MemoryEngine::attach(const Volume& volume) {
  files_.push_back({volume.descriptor(), volume.alignment()});
  return static_cast<int>(files_.size()) - 1;
}

void MemoryEngine::submit(std::span<const Request> requests) {
  in_flight_.insert(in_flight_.end(), requests.begin(), requests.end());
  MA_INVARIANT(in_flight_.size() <= queue_depth_);
}

std::size_t MemoryEngine::reap(std::span<Completion> completions, std::size_t count_min,
                               std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::size_t count = 0;
  while (count < completions.size()) {
    const std::vector<std::size_t> candidates = ready();
    if (candidates.empty() || happens(faults_->delay, &faults_->counts.delay)) {
      // Polled: clearing the paused flag notifies nobody. A test's engine may be this lazy.
      const bool over = std::chrono::steady_clock::now() >= deadline;
      if (count >= count_min || over || wait(std::chrono::milliseconds(1))) break;
      continue;
    }
    std::size_t index = candidates.front();
    if (happens(faults_->reorder, &faults_->counts.reorder)) {
      index = candidates[random_() % candidates.size()];
    }
    const Request request = in_flight_[index];
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
    completions[count++] = {request.tag, run(request)};
  }
  return count;
}

// Places in in_flight_ of the requests that may complete.
std::vector<std::size_t> MemoryEngine::ready() const {
  std::vector<std::size_t> result;
  if (faults_->paused) return result;
  const bool slow_rests = std::chrono::steady_clock::now() >= slow_until_;
  for (std::size_t index = 0; index < in_flight_.size(); ++index) {
    const int volume_index = in_flight_[index].volume_index;
    if (volume_index == faults_->paused_volume) continue;
    if (volume_index != faults_->slow_volume || slow_rests) result.push_back(index);
  }
  return result;
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
  const File& file = files_[static_cast<std::size_t>(request.volume_index)];
  if (!is_aligned(request.offset | request.nbytes, file.alignment.offset_bytes)) return -EINVAL;
  if (!is_aligned(request.data, file.alignment.memory_bytes)) return -EINVAL;
  if (request.volume_index == faults_->slow_volume) {
    slow_until_ = std::chrono::steady_clock::now() +
                  std::chrono::milliseconds(faults_->slow_milliseconds.load());
  }
  const bool writes = request.operation == Operation::kWrite;
  MemoryFaultCounts& counts = faults_->counts;
  if (faults_->gone != 0) return -faults_->gone;
  if (happens(faults_->again, &counts.again)) return happens(0.5) ? -EAGAIN : -EINTR;
  if (happens(faults_->eio, &counts.eio)) return -EIO;
  if (writes && happens(faults_->enospc, &counts.enospc)) return -ENOSPC;
  std::uint64_t nbytes = request.nbytes;
  if (happens(faults_->short_transfer, &counts.short_transfer)) nbytes = 1 + random_() % nbytes;
  if (writes && happens(faults_->lost, &counts.lost)) return static_cast<std::int64_t>(nbytes);
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = writes ? ::pwrite(file.descriptor, request.data, nbytes, offset)
                               : ::pread(file.descriptor, request.data, nbytes, offset);
  if (moved < 0) return -errno;
  if (writes || moved == 0) return moved;
  const std::pair place{request.volume_index, request.offset};
  if (flipped_.erase(place) == 0 && happens(faults_->flip, &counts.flip)) {
    flipped_.insert(place);
    const std::uint64_t bit = random_() % (static_cast<std::uint64_t>(moved) * 8);
    request.data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  return moved;
}

}  // namespace memascend

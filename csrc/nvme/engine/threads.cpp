#include "nvme/engine/threads.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.hpp"
#include "system/thread.hpp"

namespace memascend {

ThreadsEngine::ThreadsEngine(const EngineOptions& options, const Volume& volume)
    : options_(options), file_(volume.descriptor()) {
  MA_EXPECT(options.thread_count > 0, "threads must be positive, got ", options.thread_count);
  MA_SYSCALL(::sem_init(&work_count_, 0, 0), "sem_init");
}

ThreadsEngine::~ThreadsEngine() {
  for (std::size_t count = workers_.size(); count > 0; --count) ::sem_post(&work_count_);
  for (std::thread& worker : workers_) worker.join();
  ::sem_destroy(&work_count_);
}

std::string ThreadsEngine::description() const {
  return join("pread and pwrite by ", options_.thread_count, " threads, depth ",
              options_.queue_depth);
}

void ThreadsEngine::start() {
  for (std::size_t count = options_.thread_count; count > 0; --count) {
    workers_.push_back(start_thread("memascend-io", [this] { work(); }));
  }
}

void ThreadsEngine::submit(std::span<const Request> requests) {
  {
    const std::lock_guard lock(mutex_);
    requests_.insert(requests_.end(), requests.begin(), requests.end());
  }
  for (std::size_t count = requests.size(); count > 0; --count) ::sem_post(&work_count_);
}

std::size_t ThreadsEngine::reap(std::span<Completion> completions,
                                std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (timeout.count() > 0) {
    result_ready_.wait_for(lock, timeout, [&] { return woken_ || !completions_.empty(); });
    woken_ = false;
  }
  const std::size_t count = std::min(completions.size(), completions_.size());
  const auto end = completions_.begin() + static_cast<std::ptrdiff_t>(count);
  std::copy(completions_.begin(), end, completions.begin());
  completions_.erase(completions_.begin(), end);
  return count;
}

void ThreadsEngine::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  result_ready_.notify_one();
}

void ThreadsEngine::work() {
  for (;;) {
    while (::sem_wait(&work_count_) != 0) {  // EINTR
    }
    std::unique_lock lock(mutex_);
    if (requests_.empty()) return;  // posted by the destructor
    const Request request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t moved = request.operation == Operation::kRead
                              ? ::pread(file_, request.data, request.nbytes, offset)
                              : ::pwrite(file_, request.data, request.nbytes, offset);
    const std::int64_t result = moved < 0 ? -errno : moved;
    lock.lock();
    completions_.push_back({request.tag, result});
    result_ready_.notify_one();
  }
}

}  // namespace memascend

#include "nvme/engine/threads.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.hpp"
#include "system/thread.hpp"

namespace memascend {

ThreadsEngine::Worklist::Worklist(int descriptor) : file(descriptor) {
  MA_SYSCALL(::sem_init(&work_count, 0, 0), "sem_init");
}

ThreadsEngine::ThreadsEngine(const EngineOptions& options) : options_(options) {
  MA_EXPECT(options.thread_count > 0, "threads must be positive, got ", options.thread_count);
}

ThreadsEngine::~ThreadsEngine() {
  for (const auto& worklist : worklists_) {
    for (std::size_t count = options_.thread_count; count > 0; --count) {
      ::sem_post(&worklist->work_count);
    }
  }
  for (std::thread& worker : workers_) worker.join();
}

std::string ThreadsEngine::description() const {
  return join("pread and pwrite by ", options_.thread_count, " threads",
              worklists_.size() > 1 ? " per volume" : "", ", depth ", options_.queue_depth);
}

int ThreadsEngine::attach(const Volume& volume) {
  worklists_.push_back(std::make_unique<Worklist>(volume.descriptor()));
  return static_cast<int>(worklists_.size()) - 1;
}

void ThreadsEngine::start() {
  for (const auto& worklist : worklists_) {
    for (std::size_t count = options_.thread_count; count > 0; --count) {
      workers_.push_back(start_thread("memascend-io", [this, own = worklist.get()] { work(own); }));
    }
  }
}

void ThreadsEngine::submit(std::span<const Request> requests) {
  {
    const std::lock_guard lock(mutex_);
    for (const Request& request : requests) {
      worklists_[static_cast<std::size_t>(request.volume_index)]->requests.push_back(request);
    }
  }
  for (const Request& request : requests) {
    ::sem_post(&worklists_[static_cast<std::size_t>(request.volume_index)]->work_count);
  }
}

std::size_t ThreadsEngine::reap(std::span<Completion> completions, std::size_t count_min,
                                std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (count_min > 0) {
    wanted_count_ = count_min;
    result_ready_.wait_for(lock, timeout,
                           [&] { return woken_ || completions_.size() >= count_min; });
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

void ThreadsEngine::work(Worklist* worklist) {
  for (;;) {
    while (::sem_wait(&worklist->work_count) != 0) {  // EINTR
    }
    std::unique_lock lock(mutex_);
    if (worklist->requests.empty()) return;  // posted by the destructor
    const Request request = worklist->requests.front();
    worklist->requests.pop_front();
    lock.unlock();
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t moved = request.operation == Operation::kRead
                              ? ::pread(worklist->file, request.data, request.nbytes, offset)
                              : ::pwrite(worklist->file, request.data, request.nbytes, offset);
    const std::int64_t result = moved < 0 ? -errno : moved;
    lock.lock();
    completions_.push_back({request.tag, result});
    if (completions_.size() >= wanted_count_) result_ready_.notify_one();
  }
}

}  // namespace memascend

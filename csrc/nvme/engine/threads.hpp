// The threads engine: pread and pwrite by a few worker threads. For systems that refuse io_uring:
// containers' seccomp profiles, kernel.io_uring_disabled, gVisor.
#pragma once

#include <semaphore.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "nvme/engine/engine.hpp"

namespace memascend {

class ThreadsEngine final : public Engine {
 public:
  /// The volume's descriptor must outlive the engine.
  ThreadsEngine(const EngineOptions& options, const Volume& volume);
  ~ThreadsEngine() override;  // waits for the requests in flight

  std::string name() const override { return "threads"; }
  std::string description() const override;
  std::size_t queue_depth() const override { return options_.queue_depth; }
  void start() override;
  void submit(std::span<const Request> requests) override;
  std::size_t reap(std::span<Completion> completions, std::chrono::milliseconds timeout) override;
  void wake() noexcept override;

 private:
  void work();

  EngineOptions options_;
  const int file_;
  // Posted once per request. Not a condition variable: with several threads waiting on one, the C
  // library (glibc 2.25 to 2.40, its bug 25847) can lose a notify_one() and with it a request.
  sem_t work_count_;
  std::mutex mutex_;                      // guards the following members but the workers
  std::deque<Request> requests_;          // waiting for a worker
  std::condition_variable result_ready_;  // only the issuer waits on it
  std::deque<Completion> completions_;
  bool woken_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace memascend

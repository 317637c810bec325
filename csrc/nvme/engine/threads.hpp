// The threads engine: pread and pwrite by a few worker threads. For systems that refuse io_uring:
// containers' seccomp profiles, kernel.io_uring_disabled, gVisor.
//
// Each volume has workers of its own: those of a slow one would else end up waiting all for it.
#pragma once

#include <semaphore.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "nvme/engine/engine.hpp"

namespace memascend {

class ThreadsEngine final : public Engine {
 public:
  explicit ThreadsEngine(const EngineOptions& options);
  ~ThreadsEngine() override;  // waits for the requests in flight

  std::string name() const override { return "threads"; }
  std::string description() const override;
  std::size_t queue_depth() const override { return options_.queue_depth; }
  int attach(const Volume& volume) override;
  void start() override;
  void submit(std::span<const Request> requests) override;
  std::size_t reap(std::span<Completion> completions, std::size_t count_min,
                   std::chrono::milliseconds timeout) override;
  void wake() noexcept override;

 private:
  /// A volume and the requests that wait for one of its workers.
  struct Worklist {
    explicit Worklist(int descriptor);
    ~Worklist() { ::sem_destroy(&work_count); }
    const int file;
    // Posted once per request. Not a condition variable: with several threads waiting on one, the C
    // library (glibc 2.25 to 2.40, its bug 25847) can lose a notify_one() and with it a request.
    sem_t work_count;
    std::deque<Request> requests;  // under the engine's mutex
  };

  void work(Worklist* worklist);

  EngineOptions options_;
  std::vector<std::unique_ptr<Worklist>> worklists_;
  std::mutex mutex_;                      // everything below but the workers
  std::condition_variable result_ready_;  // only the issuer waits on it
  std::deque<Completion> completions_;
  std::size_t wanted_count_ = 1;  // completions that the waiting reap() asked for
  bool woken_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace memascend

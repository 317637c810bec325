#include "kernels/threads.hpp"

#include <sched.h>

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "system/thread.hpp"

namespace memascend::kernels {

std::size_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<std::size_t>(std::max(1, CPU_COUNT(&set)));
  }
  // The machine has more CPUs than the fixed-size set holds.
  return std::max<std::size_t>(1, std::thread::hardware_concurrency());
}

class Helpers::Crew {
 public:
  Crew() = default;
  ~Crew() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    begun_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  void run(std::size_t helper_count, const std::function<void()>& work) {
    const std::lock_guard turn(turn_);
    start_missing(helper_count);
    {
      const std::lock_guard lock(mutex_);
      work_ = &work;
      // A thread inherits this environment when it is started, perhaps by another caller; it
      // decides whether denormals are flushed.
      std::fegetenv(&arithmetic_);
      free_place_count_ = std::min(helper_count, threads_.size());
    }
    // Wake as many as there are places; more would contend for the mutex.
    for (std::size_t left = helper_count; left > 0; --left) begun_.notify_one();
    work();
    std::unique_lock lock(mutex_);
    free_place_count_ = 0;  // a thread that has not joined yet has nothing left to do
    ended_.wait(lock, [this] { return working_count_ == 0; });
  }

  std::size_t thread_count() {
    const std::lock_guard turn(turn_);
    return threads_.size();
  }

 private:
  void start_missing(std::size_t helper_count) {
    threads_.reserve(helper_count);  // so that push_back cannot fail with a running thread
    try {
      while (threads_.size() < helper_count) {
        threads_.push_back(start_thread("memascend-work", [this] { help(); }));
      }
    } catch (const std::system_error&) {
      // The system allows no more threads: the existing ones share the work.
    }
  }

  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      begun_.wait(lock, [this] { return stopping_ || free_place_count_ > 0; });
      if (stopping_) return;
      --free_place_count_;
      ++working_count_;
      const std::function<void()>& work = *work_;
      std::fesetenv(&arithmetic_);
      lock.unlock();
      work();
      lock.lock();
      if (--working_count_ == 0) ended_.notify_one();
    }
  }

  std::mutex turn_;  // between callers, held for a whole call
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards the following members
  std::condition_variable begun_;
  std::condition_variable ended_;
  const std::function<void()>* work_ = nullptr;
  std::fenv_t arithmetic_{};
  std::size_t free_place_count_ = 0;
  std::size_t working_count_ = 0;
  bool stopping_ = false;
};

Helpers::Helpers() : crew_(std::make_unique<Crew>()) {}

Helpers::~Helpers() {
  if (!owner_.is_current()) (void)crew_.release();  // the threads are not in this process
}

void Helpers::run(std::size_t count, const std::function<void()>& work) {
  if (count <= 1 || !owner_.is_current()) return work();
  crew_->run(count - 1, work);
}

std::size_t Helpers::thread_count() const {
  return owner_.is_current() ? crew_->thread_count() : 0;
}

void run_on_threads(Helpers* helpers, std::size_t count, const std::function<void()>& work) {
  if (helpers != nullptr) return helpers->run(count, work);
  Helpers().run(count, work);
}

}  // namespace memascend::kernels

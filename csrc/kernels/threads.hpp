// Threads that share the work of a kernel. Knows a function to run; never knows tiles or memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "system/owner_process.hpp"

namespace memascend::kernels {

inline constexpr std::size_t kThreadsMax = 256;

/// The CPUs the calling thread may run on: a rank bound to a few cores must not use those of other
/// ranks.
std::size_t usable_cpus();

/// Threads kept between calls, since starting and joining them costs about as much as a small tile.
/// They start when a call first needs them, have all signals blocked, and are joined on
/// destruction. Thread-safe: callers take turns. In a forked child, which has none of the threads,
/// the caller works alone.
class Helpers {
 public:
  Helpers();
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  /// Runs `work` on the calling thread and on up to `count` - 1 others; returns after all have left
  /// it. Others join only while it runs on the calling thread: `work` takes shares in a loop, and
  /// may return only when none is left. It runs in the caller's floating-point environment, must
  /// not throw, and must not call run(). Pre: count is at most kThreadsMax.
  void run(std::size_t count, const std::function<void()>& work);
  /// Number of threads that have been started.
  std::size_t thread_count() const;

 private:
  class Crew;
  const OwnerProcess owner_;
  std::unique_ptr<Crew> crew_;
};

/// The same with the threads of `helpers`, or with temporary ones if it is null.
void run_on_threads(Helpers* helpers, std::size_t count, const std::function<void()>& work);

}  // namespace memascend::kernels

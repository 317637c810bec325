// Starts threads that only work: named, and deaf to signals, so that a signal always interrupts one
// of the program's own threads. Has them run near what they work for.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <span>
#include <thread>
#include <utility>

namespace memascend {

/// `name` has at most 15 characters. Throws std::system_error when there can be no more threads.
template <typename Body>
std::thread start_thread(const char* name, Body&& body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits the mask
  try {
    std::thread thread(std::forward<Body>(body));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

/// Keeps this thread, and those that it starts from now on, to some processors, as far as it may
/// use them. Best effort: elsewhere it is slower, not wrong.
inline void stay_on(std::span<const int> cpus) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &wanted);
  }
  if (CPU_COUNT(&wanted) > 0) (void)::sched_setaffinity(0, sizeof(wanted), &wanted);
}

}  // namespace memascend

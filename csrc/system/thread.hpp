// Starts worker threads: named, and with all signals blocked, so that a signal always interrupts
// one of the program's own threads. Also sets their CPU affinity.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <span>
#include <thread>
#include <utility>

namespace memascend {

/// `name` has at most 15 characters. Throws std::system_error if no more threads are allowed.
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

/// Restricts this thread, and threads that it starts later, to those of `cpus` that it may use.
/// Best effort: on other processors it is slower, not wrong.
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

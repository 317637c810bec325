// Starts threads that only work: named, and deaf to signals, so that a signal always interrupts one
// of the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

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

}  // namespace memascend

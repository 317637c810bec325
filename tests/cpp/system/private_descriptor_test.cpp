// sources: csrc/system/private_descriptor.cpp
//
// A descriptor that forked children do not get, and cannot close for others.
#include "system/private_descriptor.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <utility>

#include "support/expect.hpp"

using memascend::PrivateDescriptor;

namespace {

bool is_open(int descriptor) { return ::fcntl(descriptor, F_GETFD) >= 0; }

int open_null() { return ::open("/dev/null", O_RDWR | O_CLOEXEC); }

bool in_child(const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(check() ? 0 : 1);
  int status = 0;
  EXPECT(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void it_is_closed_once() {
  const int number = open_null();
  {
    PrivateDescriptor first(number);
    PrivateDescriptor second(std::move(first));
    EXPECT(first.get() == -1);
    EXPECT(second.get() == number);
    EXPECT(is_open(number));
  }
  EXPECT(!is_open(number));
  PrivateDescriptor none(-1);
  none.close();
}

void a_child_has_no_copy() {
  const PrivateDescriptor own(open_null());
  const int shared = open_null();
  EXPECT(in_child([&, number = own.get()] { return !is_open(number) && is_open(shared); }));
  EXPECT(is_open(own.get()));
  ::close(shared);
}

void a_child_does_not_close_what_has_the_number_now() {
  PrivateDescriptor own(open_null());
  const int number = own.get();
  EXPECT(in_child([&] {
    if (own.get() != -1) return false;
    const PrivateDescriptor taken(open_null());  // the lowest that is free
    if (taken.get() != number) return false;
    own.close();
    return is_open(taken.get());
  }));
}

void a_fork_beside_threads_that_open_and_close_does_not_hang() {
  std::atomic<bool> over = false;
  std::thread busy([&] {
    while (!over) PrivateDescriptor brief(open_null());
  });
  for (int count = 0; count < 50; ++count) EXPECT(in_child([] { return true; }));
  over = true;
  busy.join();
}

}  // namespace

int main() {
  it_is_closed_once();
  a_child_has_no_copy();
  a_child_does_not_close_what_has_the_number_now();
  a_fork_beside_threads_that_open_and_close_does_not_hang();
  return 0;
}

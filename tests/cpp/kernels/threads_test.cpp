// sources: csrc/kernels/threads.cpp
//
// Threads that share work: as many as asked, the caller's among them, none left in it at the end,
// the same ones in the next call.
#include "kernels/threads.hpp"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cfenv>
#include <csignal>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "support/expect.hpp"

namespace {

using namespace memascend;

/// Which threads took part, each waiting for all others: none comes twice.
std::set<std::thread::id> threads_of_a_call(kernels::Helpers* helpers, std::size_t count) {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::barrier all(static_cast<std::ptrdiff_t>(count));
  kernels::run_on_threads(helpers, count, [&] {
    {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    }
    all.arrive_and_wait();
  });
  return seen;  // without a lock: nobody else is left
}

void test_as_many_threads_work_as_were_asked_for() {
  for (const std::size_t count : {std::size_t{1}, std::size_t{2}, std::size_t{9}}) {
    const std::set<std::thread::id> seen = threads_of_a_call(nullptr, count);
    EXPECT(seen.size() == count);
    EXPECT(seen.contains(std::this_thread::get_id()));
  }
}

void test_the_caller_works_also_when_no_thread_is_asked_for() {
  int calls = 0;
  kernels::run_on_threads(nullptr, 0, [&calls] { ++calls; });
  EXPECT(calls == 1);
}

void test_the_next_call_has_the_same_threads() {
  kernels::Helpers helpers;
  EXPECT(helpers.thread_count() == 0);
  const std::set<std::thread::id> first = threads_of_a_call(&helpers, 4);
  EXPECT(helpers.thread_count() == 3);
  for (int call = 0; call < 200; ++call) EXPECT(threads_of_a_call(&helpers, 4) == first);
  EXPECT(threads_of_a_call(&helpers, 2).size() == 2);
  EXPECT(helpers.thread_count() == 3);
}

void test_a_call_does_not_wait_for_threads_that_have_not_come() {
  kernels::Helpers helpers;
  std::atomic<int> parts{0};
  for (int call = 0; call < 200; ++call) {
    std::atomic<int> next{0};
    helpers.run(8, [&] {
      while (next.fetch_add(1) < 16) ++parts;
    });
    EXPECT(parts == 16 * (call + 1));
  }
}

void test_callers_take_turns() {
  kernels::Helpers helpers;
  std::vector<std::thread> callers;
  std::atomic<int> parts{0};
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int call = 0; call < 100; ++call) {
        std::atomic<int> next{0};
        helpers.run(3, [&] {
          while (next.fetch_add(1) < 5) ++parts;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT(parts == 3 * 100 * 5);
}

/// The mode of rounding stands for all of the environment.
void test_threads_compute_as_the_caller_does_in_each_call() {
  kernels::Helpers helpers;
  for (const int mode : {FE_TONEAREST, FE_UPWARD, FE_TONEAREST}) {
    EXPECT(std::fesetround(mode) == 0);
    std::atomic<int> alike{0};
    std::barrier all(3);
    helpers.run(3, [&] {
      if (std::fegetround() == mode) ++alike;
      all.arrive_and_wait();
    });
    EXPECT(alike == 3);
  }
}

void test_threads_are_deaf_to_signals() {
  kernels::Helpers helpers;
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> deaf{0};
  std::barrier all(2);
  helpers.run(2, [&] {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    if (std::this_thread::get_id() != caller && sigismember(&blocked, SIGINT) == 1) ++deaf;
    all.arrive_and_wait();
  });
  EXPECT(deaf == 1);
}

void test_in_a_forked_child_the_caller_works_alone() {
  auto helpers = std::make_unique<kernels::Helpers>();
  threads_of_a_call(helpers.get(), 3);
  const pid_t child = fork();
  if (child == 0) {
    int calls = 0;
    helpers->run(3, [&calls] { ++calls; });
    helpers.reset();
    _exit(calls);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status));
  EXPECT(WEXITSTATUS(status) == 1);
  EXPECT(threads_of_a_call(helpers.get(), 3).size() == 3);
}

}  // namespace

int main() {
  test_as_many_threads_work_as_were_asked_for();
  test_the_caller_works_also_when_no_thread_is_asked_for();
  test_the_next_call_has_the_same_threads();
  test_a_call_does_not_wait_for_threads_that_have_not_come();
  test_callers_take_turns();
  test_threads_compute_as_the_caller_does_in_each_call();
  test_threads_are_deaf_to_signals();
  test_in_a_forked_child_the_caller_works_alone();
  EXPECT(kernels::usable_cpus() >= 1);
  return 0;
}

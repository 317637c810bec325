// sources: csrc/kernels/threads.cpp
//
// Threads for the length of one call: as many as asked, the caller's among them, all over at its
// end.
#include "kernels/threads.hpp"

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "support/expect.hpp"

namespace {

using namespace memascend;

void test_every_thread_works_once_and_is_over_at_the_end() {
  for (const std::size_t count : {std::size_t{1}, std::size_t{2}, std::size_t{9}}) {
    std::mutex mutex;
    std::set<std::thread::id> seen;
    std::size_t calls = 0;
    kernels::run_on_threads(count, [&] {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
      ++calls;
    });
    // Without a lock: nobody else is left.
    EXPECT(calls == count);
    EXPECT(seen.contains(std::this_thread::get_id()));
  }
}

void test_the_caller_works_also_when_no_thread_is_asked_for() {
  int calls = 0;
  kernels::run_on_threads(0, [&calls] { ++calls; });
  EXPECT(calls == 1);
}

}  // namespace

int main() {
  test_every_thread_works_once_and_is_over_at_the_end();
  test_the_caller_works_also_when_no_thread_is_asked_for();
  EXPECT(kernels::usable_cpus() >= 1);
  return 0;
}

#include "kernels/threads.hpp"

#include <sched.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace memascend::kernels {

std::size_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<std::size_t>(std::max(1, CPU_COUNT(&set)));
  }
  // More CPUs than the fixed-size set holds.
  return std::max<std::size_t>(1, std::thread::hardware_concurrency());
}

void run_on_threads(std::size_t count, const std::function<void()>& work) {
  std::vector<std::jthread> helpers;
  if (count > 1) helpers.reserve(count - 1);
  try {
    for (std::size_t index = 1; index < count; ++index) helpers.emplace_back(std::cref(work));
  } catch (const std::system_error&) {
    // The system has no more threads to give: the ones there are share all of it.
  }
  work();
}

}  // namespace memascend::kernels

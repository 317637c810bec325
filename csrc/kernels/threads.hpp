// Threads for the length of one kernel: started, worked and joined within a call.
#pragma once

#include <cstddef>
#include <functional>

namespace memascend::kernels {

inline constexpr std::size_t kThreadsMax = 256;

/// The CPUs the calling thread may run on: a rank bound to a few cores must not spill over the
/// others'.
std::size_t usable_cpus();

/// Runs `work` on `count` threads, the caller's included, and returns when all have returned. On
/// fewer where the system has no more to give: `work` takes its share as it comes. It must not
/// throw.
void run_on_threads(std::size_t count, const std::function<void()>& work);

}  // namespace memascend::kernels

// The fused overflow check: one pass over memory that says whether any element is inf or nan and,
// when asked, gives the sum of squares. No temporary, whatever the size.
//
// Knows addresses, counts and number formats; must never know tensors, stores or devices.
// Every function here may be called from any thread; the caller keeps the memory alive and
// unwritten.
#pragma once

#include <cstddef>

#include "kernels/format.hpp"
#include "kernels/isa.hpp"
#include "kernels/threads.hpp"

namespace memascend::overflow {

using kernels::Format;
using kernels::Isa;
using kernels::kThreadsMax;

struct ScanOptions {
  bool sum_squares = false;
  /// 0: the CPUs this thread may run on, at most one per kThreadBytesMin of memory.
  std::size_t threads = 0;
  /// Threads kept between calls; null: they are started for this call and joined.
  kernels::Helpers* helpers = nullptr;
};

struct ScanResult {
  bool non_finite = false;
  /// NaN unless it was asked for and every element is finite.
  double sum_squares = 0.0;
};

/// A thread costs some 30 us to start and join, or 10 us to wake, so it must find about 0.3 ms of
/// reading to do.
/// Memory below twice this size is scanned by the calling thread alone.
inline constexpr std::size_t kThreadBytesMin = std::size_t{4} << 20;

/// Scans `numel` elements that start at `address`, which needs no alignment at all.
///
/// The sum is accumulated in double, in an order that depends on `numel` alone: equal bits for
/// every thread count, instruction set and alignment. Squares of both 16-bit formats and of fp32
/// are exact in double and cannot overflow there, so the relative error is that of the additions,
/// below 1e-11 for 1e9 elements. Subnormals count in full even when the calling thread flushes
/// them.
///
/// Without a finding every element is read once; with one, the rest is left unread.
/// `isa` must be one of kernels::available_isas(). Throws std::invalid_argument on a caller's
/// mistake.
ScanResult scan(const void* address, std::size_t numel, Format format, Isa isa,
                const ScanOptions& options);

}  // namespace memascend::overflow

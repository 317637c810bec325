// The fused overflow check: one pass over memory that finds out if any element is inf or nan and,
// if requested, computes the sum of squares. No temporary of any size.
//
// Knows addresses, counts and number formats; must never know tensors, stores or devices. Any
// thread may call every function here; the caller keeps the memory alive and unwritten.
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
  /// Threads kept between calls; null: threads are started for this call and joined.
  kernels::Helpers* helpers = nullptr;
};

struct ScanResult {
  bool non_finite = false;
  /// NaN unless it was requested and every element is finite.
  double sum_squares = 0.0;
};

/// A thread costs about 30 us to start and join, or 10 us to wake, so its share should take at
/// least 0.3 ms to read. Memory below twice this size is scanned by the calling thread alone.
inline constexpr std::size_t kThreadBytesMin = std::size_t{4} << 20;

/// Scans `numel` elements from `address` on, which may have any alignment.
///
/// The sum is accumulated in double, in an order that depends only on `numel`: equal bits for every
/// thread count, instruction set and alignment. Squares of both 16-bit formats and of fp32 are
/// exact in double and cannot overflow there, so the relative error is that of the additions, below
/// 1e-11 for 1e9 elements. Subnormals are kept even if the calling thread flushes them.
///
/// Without a finding every element is read once; after one, the rest is not read. `isa` must be one
/// of kernels::available_isas(). Throws std::invalid_argument on a caller's mistake.
ScanResult scan(const void* address, std::size_t numel, Format format, Isa isa,
                const ScanOptions& options);

}  // namespace memascend::overflow

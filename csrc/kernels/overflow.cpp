// Dispatch, partition and threads of the overflow check. The arithmetic is in overflow_<isa>.cpp.
//
// Memory is cut into blocks, and blocks are grouped into at most kPartsMax parts; both depend only
// on the element count. Threads take parts in turn; the sums are added in the order of the parts at
// the end. So the result does not depend on the number or speed of the threads, and the scratch is
// one small array on the stack.
#include "kernels/overflow.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/check.hpp"
#include "kernels/overflow_block.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace memascend::overflow {
namespace {

/// Limits the bytes read after a finding, and is large enough to hide the work per block. A
/// multiple of kLanes elements in every format.
constexpr std::size_t kBlockBytes = std::size_t{64} << 10;
constexpr std::size_t kPartsMax = 256;

constexpr std::size_t ceil_divide(std::size_t value, std::size_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

/// Round to nearest, keep subnormals: a sum must not depend on torch.set_flush_denormal().
class DefaultArithmetic {
 public:
#if defined(__x86_64__)
  DefaultArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(kPowerOnState); }
  ~DefaultArithmetic() { _mm_setcsr(saved_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  static constexpr unsigned kPowerOnState = 0x1f80;
  unsigned saved_;
#endif
};

/// One scan; every thread runs `work`, the caller's included.
class Scan {
 public:
  Scan(const std::byte* source, std::size_t numel, Format format, Kernels kernels, bool sum_squares)
      : source_(source),
        numel_(numel),
        element_bytes_(kernels::element_bytes(format)),
        kernels_(kernels),
        sum_squares_(sum_squares),
        block_numel_(kBlockBytes / element_bytes_) {
    const std::size_t blocks = ceil_divide(numel, block_numel_);
    part_numel_ = ceil_divide(blocks, kPartsMax) * block_numel_;
    part_count_ = numel == 0 ? 0 : ceil_divide(numel, part_numel_);
  }

  std::size_t part_count() const { return part_count_; }

  void work() {
    [[maybe_unused]] const DefaultArithmetic arithmetic;
    for (;;) {
      const std::size_t part = part_next_.fetch_add(1, std::memory_order_relaxed);
      if (part >= part_count_ || !scan_part(part)) return;
    }
  }

  /// Call after every thread has left work().
  ScanResult result() const {
    const bool found = found_.load(std::memory_order_relaxed);
    if (found || !sum_squares_) return {found, std::numeric_limits<double>::quiet_NaN()};
    double total = 0.0;
    for (std::size_t part = 0; part < part_count_; ++part) total += part_sums_[part];
    return {false, total};
  }

 private:
  /// False if this or another thread has found a non-finite element: the rest need not be read.
  bool scan_part(std::size_t part) {
    const std::size_t first = part * part_numel_;
    const std::size_t limit = std::min(numel_, first + part_numel_);
    double part_sum = 0.0;
    for (std::size_t index = first; index < limit; index += block_numel_) {
      if (found_.load(std::memory_order_relaxed)) return false;
      const std::byte* block = source_ + index * element_bytes_;
      const std::size_t numel = std::min(block_numel_, limit - index);
      bool found = false;
      if (sum_squares_) {
        // A sum of finite squares stays in the range of a double, so the sum itself is the flag.
        const double block_sum = kernels_.sum(block, numel);
        found = !std::isfinite(block_sum);
        part_sum += block_sum;
      } else {
        found = kernels_.find(block, numel);
      }
      if (found) {
        found_.store(true, std::memory_order_relaxed);
        return false;
      }
    }
    part_sums_[part] = part_sum;
    return true;
  }

  const std::byte* source_;
  std::size_t numel_;
  std::size_t element_bytes_;
  Kernels kernels_;
  bool sum_squares_;
  std::size_t block_numel_;
  std::size_t part_numel_ = 0;
  std::size_t part_count_ = 0;
  std::atomic<std::size_t> part_next_{0};
  std::atomic<bool> found_{false};
  std::array<double, kPartsMax> part_sums_{};
};

std::size_t choose_threads(std::size_t asked, std::size_t nbytes) {
  if (asked != 0) return asked;
  if (nbytes < 2 * kThreadBytesMin) return 1;
  return std::min({kernels::usable_cpus(), nbytes / kThreadBytesMin, kThreadsMax});
}

Kernels kernels_of(Isa isa, Format format) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512_kernels(format);
  if (isa == Isa::kAvx2) return avx2_kernels(format);
#endif
  MA_EXPECT(isa == Isa::kScalar, "no ", kernels::name(isa), " kernel in this build");
  return scalar_kernels(format);
}

}  // namespace

ScanResult scan(const void* address, std::size_t numel, Format format, Isa isa,
                const ScanOptions& options) {
  MA_EXPECT(address != nullptr || numel == 0, "cannot scan ", numel, " elements at address 0");
  MA_EXPECT(numel <= std::numeric_limits<std::size_t>::max() / kernels::element_bytes(format),
            "cannot scan ", numel, " elements: more bytes than an address space has");
  MA_EXPECT(options.threads <= kThreadsMax, "threads must be 0 (automatic) to ", kThreadsMax,
            ", got ", options.threads);
  Scan scan(static_cast<const std::byte*>(address), numel, format, kernels_of(isa, format),
            options.sum_squares);
  const std::size_t threads = std::min(
      choose_threads(options.threads, numel * kernels::element_bytes(format)), scan.part_count());
  kernels::run_on_threads(options.helpers, threads, [&scan] { scan.work(); });
  return scan.result();
}

}  // namespace memascend::overflow

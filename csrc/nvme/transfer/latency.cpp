#include "nvme/transfer/latency.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace memascend {
namespace {

// There is one writing thread, so no atomic addition is needed.
void increase(std::atomic<std::uint64_t>& value) noexcept {
  value.store(value.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace

void Latencies::add(std::chrono::nanoseconds time) noexcept {
  const auto nanoseconds = static_cast<std::uint64_t>(std::max<std::int64_t>(time.count(), 0));
  if (nanoseconds > longest_.load(std::memory_order_relaxed)) {
    longest_.store(nanoseconds, std::memory_order_relaxed);
  }
  increase(counts_[bucket_of(nanoseconds)]);
}

// Bucket 4e + q has [4 + q, 5 + q) * 2^e / 4 nanoseconds; below 4 some stay empty.
std::size_t Latencies::bucket_of(std::uint64_t nanoseconds) noexcept {
  if (nanoseconds == 0) return 0;
  const auto exponent = static_cast<std::size_t>(std::bit_width(nanoseconds)) - 1;
  const std::uint64_t quarter = (nanoseconds << 2 >> exponent) & 3;
  return std::min(4 * exponent + quarter, kBucketCount - 1);
}

double Latencies::end_of(std::size_t bucket) noexcept {
  const auto quarters = static_cast<double>(5 + bucket % 4);
  return std::ldexp(quarters / 4, static_cast<int>(bucket / 4)) * 1e-9;
}

Latencies::Summary Latencies::summarize(std::initializer_list<const Latencies*> parts) {
  std::array<std::uint64_t, kBucketCount> counts{};
  Summary summary;
  for (const Latencies* part : parts) {
    for (std::size_t bucket = 0; bucket < kBucketCount; ++bucket) {
      counts[bucket] += part->counts_[bucket].load(std::memory_order_relaxed);
    }
    const auto longest = static_cast<double>(part->longest_.load(std::memory_order_relaxed)) * 1e-9;
    summary.longest = std::max(summary.longest, longest);
  }
  for (const std::uint64_t count : counts) summary.count += count;
  const auto percentile = [&](double share) {
    const double wanted = share * static_cast<double>(summary.count);
    double seen = 0;
    for (std::size_t bucket = 0; bucket < kBucketCount; ++bucket) {
      seen += static_cast<double>(counts[bucket]);
      if (seen >= wanted) return std::min(end_of(bucket), summary.longest);
    }
    return summary.longest;
  };
  if (summary.count == 0) return summary;
  summary.p50 = percentile(0.5);
  summary.p99 = percentile(0.99);
  summary.p999 = percentile(0.999);
  return summary;
}

}  // namespace memascend

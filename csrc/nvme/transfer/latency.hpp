// Latencies: a histogram of request times, with four buckets per doubling.
//
// Cheap enough to be always on: one addition per request. One thread adds, any thread reads.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace memascend {

class Latencies {
 public:
  /// In seconds. A percentile is the upper end of its bucket: at most a quarter too large,
  /// up to some hours.
  struct Summary {
    std::uint64_t count = 0;
    double p50 = 0;
    double p99 = 0;
    double p999 = 0;
    double longest = 0;
  };

  void add(std::chrono::nanoseconds time) noexcept;
  /// Summary of all parts together.
  static Summary summarize(std::initializer_list<const Latencies*> parts);

 private:
  static constexpr std::size_t kBucketCount = 4 * 44;  // the last begins at four hours
  static std::size_t bucket_of(std::uint64_t nanoseconds) noexcept;
  static double end_of(std::size_t bucket) noexcept;

  std::array<std::atomic<std::uint64_t>, kBucketCount> counts_{};
  std::atomic<std::uint64_t> longest_ = 0;  // nanoseconds
};

}  // namespace memascend

// The memory engine: a device in RAM with faults from a seeded generator. Tests only.
//
// It runs requests on volumes opened with Volume::open_in_memory, on the issuing thread, inside
// reap(), and refuses misaligned requests as a strict device does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "nvme/engine/engine.hpp"

namespace memascend {

/// Number of injected faults, by kind.
struct MemoryFaultCounts {
  std::atomic<std::uint64_t> short_transfer = 0;
  std::atomic<std::uint64_t> eio = 0;
  std::atomic<std::uint64_t> enospc = 0;
  std::atomic<std::uint64_t> again = 0;
  std::atomic<std::uint64_t> reorder = 0;
  std::atomic<std::uint64_t> delay = 0;
  std::atomic<std::uint64_t> lost = 0;
  std::atomic<std::uint64_t> flip = 0;
};

/// Faults to inject, each with a probability from 0 to 1 per request. Any thread may change the
/// paused, slow and gone members while the engine runs; the others are fixed.
struct MemoryFaults {
  std::uint64_t seed = 0;
  double short_transfer = 0;  // a part is moved, of any number of bytes
  double eio = 0;
  double enospc = 0;   // writes only
  double again = 0;    // EAGAIN or EINTR, nothing moved
  double reorder = 0;  // a random request in flight completes next, not the oldest
  double flip = 0;     // a bit of the data read flips on its way; not in a second read
  double lost = 0;     // a write is reported done but is not on the volume
  double delay = 0;    // this reap() returns nothing though requests are in flight
  std::uint64_t capacity_bytes = std::uint64_t{1} << 30;  // per volume
  std::atomic<bool> paused = false;                       // while true, nothing completes
  std::atomic<int> paused_volume = -1;                    // nothing of this volume completes
  static constexpr int kEveryVolume = -2;
  std::atomic<int> slow_volume =
      -1;  // or every one: runs slow_width requests at a time, each for slow_milliseconds
  std::atomic<int> slow_milliseconds = 0;
  std::atomic<int> slow_width = 1;
  std::atomic<int> gone = 0;  // the errno of every request from now on
  MemoryFaultCounts counts;   // raised by the engine
};

class MemoryEngine final : public Engine {
 public:
  /// Pre: options.faults is set. The volume's descriptor must outlive the engine.
  MemoryEngine(const EngineOptions& options, const Volume& volume);

  std::string name() const override { return "memory"; }
  std::string description() const override;
  std::size_t queue_depth() const override { return options_.queue_depth; }
  void start() override {}
  void submit(std::span<const Request> requests) override;
  std::size_t reap(std::span<Completion> completions, std::chrono::milliseconds timeout) override;
  void wake() noexcept override;

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct InFlight {
    Request request;
    Time end;  // no earlier than this it completes, while the volume is slow
  };

  bool happens(double probability, std::atomic<std::uint64_t>* count = nullptr);
  std::size_t ready_count() const;
  bool is_slow() const;
  Time next_end();
  std::int64_t run(const Request& request);
  bool wait(std::chrono::milliseconds timeout);

  EngineOptions options_;
  MemoryFaults& faults_;
  const int file_;
  const Alignment alignment_;
  std::mt19937_64 random_;
  std::vector<InFlight> in_flight_;  // oldest first
  std::vector<Time> busy_until_;     // each of the requests that a slow volume runs at a time
  std::set<std::uint64_t> flipped_;  // offsets of the last read there
  std::mutex mutex_;                 // guards woken_
  std::condition_variable wake_;
  bool woken_ = false;
};

}  // namespace memascend

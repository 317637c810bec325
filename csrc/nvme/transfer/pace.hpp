// Pace: finds the volume that is far slower than the others beside it.
//
// What is compared is what a volume moves while it has something to do, for its weight. A volume
// that is as fast as its weight states is never slow, however uneven the weights; one that rests is
// not looked at. The caller hands in the time, of a steady clock. Pure arithmetic; any
// thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace memascend {

/// A volume that has become slow. Rates are bytes per second of busy time.
struct SlowVolume {
  std::size_t index;
  double rate;
  double expected_rate;  // what its weight would be, at the others' pace
  bool first_spell;      // it was not slow before
};

class Pace {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::chrono::milliseconds window{10'000};  // is looked at as a whole
    unsigned window_count = 2;                 // slow in so many, one after the other
    double factor = 10;                        // slower than its weight states
  };

  /// Pre: weights are positive.
  Pace(std::vector<double> weights, const Options& options);

  /// The volume had requests in flight for so long.
  void note_busy(std::size_t index, Clock::duration time);
  /// A request of so many bytes is over.
  void note_moved(std::size_t index, std::uint64_t nbytes);
  /// Volumes that have become slow with the window that ends now; mostly none.
  std::vector<SlowVolume> look(Clock::time_point now);

 private:
  struct Account {
    double weight;
    double busy_seconds = 0;
    double bytes = 0;
    double request_count = 0;
    unsigned slow_windows = 0;  // one after the other
    bool was_slow = false;
  };

  bool is_slow(const Account& own, double window_seconds, SlowVolume* found) const;

  Options options_;
  std::mutex mutex_;  // what follows
  std::vector<Account> accounts_;
  Clock::time_point began_{};  // the window
};

}  // namespace memascend

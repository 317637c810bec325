// Pace: finds a volume that is far slower than the others.
//
// Compares the bytes per busy second of the volumes, each divided by its weight. A volume that is
// as fast as its weight states is never slow, however uneven the weights; an idle one is not
// compared. The caller gives the time, of a steady clock. Pure arithmetic; any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace memascend {

/// A volume that has become slow. Rates are in bytes per second of busy time.
struct SlowVolume {
  std::size_t index;
  double rate;
  double expected_rate;  // the rate for its weight, at the others' pace
  bool first_spell;      // it has not been slow before
};

class Pace {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::chrono::milliseconds window{10'000};  // evaluated as a whole
    unsigned window_count = 2;                 // consecutive slow windows before a report
    double factor = 10;                        // slower than its weight states, by this factor
  };

  /// Pre: weights are positive.
  Pace(std::vector<double> weights, const Options& options);

  /// The volume had requests in flight for this time.
  void note_busy(std::size_t index, Clock::duration time);
  /// A request of so many bytes has completed.
  void note_moved(std::size_t index, std::uint64_t nbytes);
  /// Returns the volumes that have become slow with the window that ends now; usually none.
  std::vector<SlowVolume> look(Clock::time_point now);

 private:
  struct Account {
    double weight;
    double busy_seconds = 0;
    double bytes = 0;
    double request_count = 0;
    unsigned slow_windows = 0;  // consecutive ones
    bool was_slow = false;
  };

  bool is_slow(const Account& own, double window_seconds, SlowVolume* found) const;

  Options options_;
  std::mutex mutex_;  // guards the following members
  std::vector<Account> accounts_;
  Clock::time_point began_{};  // begin of the window
};

}  // namespace memascend

#include "nvme/transfer/pace.hpp"

namespace memascend {
namespace {

// Fraction of the window; a volume that is busy for less does not delay the others.
constexpr double kBusyShare = 0.25;
// Conditions on the others' work for a comparison: some requests, not much less work, not much
// larger requests. A single small request has a low rate on every drive.
constexpr double kOtherRequestCountMin = 8;
constexpr double kWorkFraction = 4;
constexpr double kRequestSizeFraction = 4;

double seconds(Pace::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Pace::Pace(std::vector<double> weights, const Options& options) : options_(options) {
  for (const double weight : weights) accounts_.push_back({weight});
}

void Pace::note_busy(std::size_t index, Clock::duration time) {
  const std::lock_guard lock(mutex_);
  accounts_[index].busy_seconds += seconds(time);
}

void Pace::note_moved(std::size_t index, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  accounts_[index].bytes += static_cast<double>(nbytes);
  accounts_[index].request_count += 1;
}

std::vector<SlowVolume> Pace::look(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (began_ == Clock::time_point{}) began_ = now;
  std::vector<SlowVolume> result;
  if (accounts_.size() < 2 || now - began_ < options_.window) return result;
  const double window_seconds = seconds(now - began_);
  for (std::size_t index = 0; index < accounts_.size(); ++index) {
    Account& own = accounts_[index];
    // Silent although it has requests: left to the watchdog; earlier windows stay as they are.
    if (own.request_count == 0 && own.busy_seconds > 0) continue;
    SlowVolume found{index, 0, 0, !own.was_slow};
    own.slow_windows = is_slow(own, window_seconds, &found) ? own.slow_windows + 1 : 0;
    if (own.slow_windows != options_.window_count) continue;
    own.was_slow = true;
    result.push_back(found);
  }
  for (Account& account : accounts_) {
    account.busy_seconds = account.bytes = account.request_count = 0;
  }
  began_ = now;
  return result;
}

bool Pace::is_slow(const Account& own, double window_seconds, SlowVolume* found) const {
  if (own.request_count == 0 || own.busy_seconds < kBusyShare * window_seconds) return false;
  double bytes = 0;
  double request_count = 0;
  double weight = 0;
  double weighted_seconds = 0;
  for (const Account& other : accounts_) {
    if (&other == &own || other.request_count == 0) continue;
    bytes += other.bytes;
    request_count += other.request_count;
    weight += other.weight;
    weighted_seconds += other.weight * other.busy_seconds;
  }
  if (request_count < kOtherRequestCountMin || weighted_seconds <= 0) return false;
  if (bytes / weight * kWorkFraction < own.bytes / own.weight) return false;
  if (own.bytes / own.request_count * kRequestSizeFraction < bytes / request_count) return false;
  found->rate = own.bytes / own.busy_seconds;
  found->expected_rate = bytes / weighted_seconds * own.weight;
  return found->rate * options_.factor < found->expected_rate;
}

}  // namespace memascend

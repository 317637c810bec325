// sources: csrc/nvme/transfer/pace.cpp
//
// Which volume is called slow, and above all which is not.
#include "nvme/transfer/pace.hpp"

#include <cmath>

#include "base/check.hpp"

namespace memascend {
namespace {

using std::chrono::seconds;

constexpr std::uint64_t kMebibyte = 1 << 20;

/// Windows of ten seconds, in which each volume is busy and moves what a test says.
struct Bench {
  Pace pace;
  Pace::Clock::time_point now = Pace::Clock::time_point{} + seconds(1000);

  explicit Bench(std::vector<double> weights) : pace(std::move(weights), {}) { pace.look(now); }

  void work(std::size_t index, double busy_seconds, int request_count,
            std::uint64_t request_bytes = kMebibyte) {
    pace.note_busy(index, std::chrono::duration_cast<Pace::Clock::duration>(
                              std::chrono::duration<double>(busy_seconds)));
    for (int count = 0; count < request_count; ++count) pace.note_moved(index, request_bytes);
  }
  std::vector<SlowVolume> end_window() { return pace.look(now += seconds(10)); }
};

void a_volume_far_behind_its_weight_is_named_once_with_its_rate() {
  Bench bench({1, 1, 1});
  for (int window = 0; window < 5; ++window) {
    bench.work(0, 0.1, 100);
    bench.work(1, 10, 100);
    bench.work(2, 0.1, 100);
    const std::vector<SlowVolume> slow = bench.end_window();
    MA_INVARIANT(slow.size() == (window == 1 ? 1 : 0));
    if (slow.empty()) continue;
    MA_INVARIANT(slow.front().index == 1);
    MA_INVARIANT(slow.front().rate == 10.0 * kMebibyte);
    MA_INVARIANT(std::abs(slow.front().expected_rate / (1000.0 * kMebibyte) - 1) < 1e-9);
  }
}

void a_second_spell_counts_again() {
  Bench bench({1, 1});
  int count = 0;
  for (const double busy_seconds : {10.0, 10.0, 0.2, 10.0, 10.0}) {
    bench.work(0, 0.1, 100);
    bench.work(1, busy_seconds, 100);
    count += static_cast<int>(bench.end_window().size());
  }
  MA_INVARIANT(count == 2);
}

// Says whether volume 1 is ever called slow.
template <typename Work>
bool is_named(std::vector<double> weights, Work work) {
  Bench bench(std::move(weights));
  for (int window = 0; window < 5; ++window) {
    work(bench, window);
    if (!bench.end_window().empty()) return true;
  }
  return false;
}

void what_is_no_reason_to_name_a_volume() {
  // As slow as its weight says.
  MA_INVARIANT(!is_named({100, 1}, [](Bench& bench, int) {
    bench.work(0, 10, 10'000);
    bench.work(1, 10, 100);
  }));
  // Slower, but not far.
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) {
    bench.work(0, 1.1, 100);
    bench.work(1, 10, 100);
  }));
  // Alone.
  MA_INVARIANT(!is_named({1}, [](Bench& bench, int) { bench.work(0, 10, 1); }));
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) { bench.work(1, 10, 10); }));
  // For one window only.
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int window) {
    bench.work(0, 0.1, 100);
    bench.work(1, window % 2 == 0 ? 10 : 0.1, 100);
  }));
  // It rests most of the time, so nobody waits for it.
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) {
    bench.work(0, 0.01, 100);
    bench.work(1, 2, 100);
  }));
  // Small requests, one at a time, beside large ones.
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) {
    bench.work(0, 1, 1000);
    bench.work(1, 5, 10'000, 4096);
  }));
  // The other has had next to nothing to do.
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) {
    bench.work(0, 0.001, 7);
    bench.work(1, 10, 7);
  }));
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) {
    bench.work(0, 0.001, 100);
    bench.work(1, 10, 1000);
  }));
  // Silent: the watchdog's.
  MA_INVARIANT(!is_named({1, 1}, [](Bench& bench, int) {
    bench.work(0, 1, 1000);
    bench.work(1, 10, 0);
  }));
}

void a_silent_window_does_not_end_a_spell() {
  MA_INVARIANT(is_named({1, 1}, [](Bench& bench, int window) {
    bench.work(0, 0.1, 100);
    bench.work(1, 10, window == 1 ? 0 : 64);
  }));
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::a_volume_far_behind_its_weight_is_named_once_with_its_rate();
  memascend::a_second_spell_counts_again();
  memascend::what_is_no_reason_to_name_a_volume();
  memascend::a_silent_window_does_not_end_a_spell();
  return 0;
}

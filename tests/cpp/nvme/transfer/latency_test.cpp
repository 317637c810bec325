// sources: csrc/nvme/transfer/latency.cpp
#include "nvme/transfer/latency.hpp"

#include "support/expect.hpp"

using namespace memascend;
using namespace std::chrono_literals;

namespace {

using Nanoseconds = std::chrono::nanoseconds;

void without_requests_there_is_nothing() {
  const Latencies latencies;
  const Latencies::Summary summary = Latencies::summarize({&latencies});
  EXPECT(summary.count == 0 && summary.p50 == 0 && summary.longest == 0);
}

// Whatever the time, the percentile is not below it, and at most a quarter above.
void a_figure_is_at_most_a_quarter_too_large() {
  for (std::int64_t time = 1000; time < 60'000'000'000; time += 1 + time / 7) {
    Latencies latencies;
    latencies.add(Nanoseconds(time));
    latencies.add(Nanoseconds(time));
    latencies.add(Nanoseconds(4 * time));  // the longest, which no figure exceeds
    const double found = Latencies::summarize({&latencies}).p50 * 1e9;
    EXPECT(found >= static_cast<double>(time));
    EXPECT(found <= 1.25 * static_cast<double>(time));
  }
}

void percentiles_are_of_all_parts_together() {
  Latencies reads;
  Latencies writes;
  for (int count = 0; count < 980; ++count) reads.add(100us);
  for (int count = 0; count < 15; ++count) writes.add(2ms);
  for (int count = 0; count < 5; ++count) writes.add(70ms);
  const Latencies::Summary both = Latencies::summarize({&reads, &writes});
  EXPECT(both.count == 1000);
  EXPECT(both.p50 >= 100e-6 && both.p50 <= 125e-6);
  EXPECT(both.p99 >= 2e-3 && both.p99 <= 2.5e-3);
  EXPECT(both.p999 == 70e-3 && both.longest == 70e-3);
  EXPECT(Latencies::summarize({&reads}).longest == 100e-6);
}

void what_is_too_short_or_too_long_is_counted() {
  Latencies latencies;
  latencies.add(Nanoseconds(-5));
  latencies.add(0ns);
  latencies.add(std::chrono::hours(2000));
  EXPECT(Latencies::summarize({&latencies}).count == 3);
  EXPECT(Latencies::summarize({&latencies}).longest == 2000 * 3600.0);
}

}  // namespace

int main() {
  without_requests_there_is_nothing();
  a_figure_is_at_most_a_quarter_too_large();
  percentiles_are_of_all_parts_together();
  what_is_too_short_or_too_long_is_counted();
  return 0;
}

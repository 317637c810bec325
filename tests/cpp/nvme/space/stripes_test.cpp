// sources: csrc/nvme/space/stripes.cpp
// Dealing stripes: in proportion, within the room there is, in few runs.
#include "nvme/space/stripes.hpp"

#include <cmath>
#include <cstdio>
#include <random>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kStripe = 1 << 20;
constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kPlenty = std::uint64_t{1} << 50;

std::vector<std::uint64_t> sums(const std::vector<StripeRun>& runs, std::size_t volume_count) {
  std::vector<std::uint64_t> result(volume_count, 0);
  for (const StripeRun& run : runs) result[run.volume_index] += run.nbytes;
  return result;
}

void equal_lanes_take_turns() {
  const std::vector<VolumeRoom> rooms{{1, kPlenty, 0}, {1, kPlenty, 0}};
  const auto runs = deal(4 * kStripe + kBlock, kStripe, rooms);
  MA_INVARIANT(runs.size() == 5);
  for (std::size_t index = 0; index < runs.size(); ++index) {
    MA_INVARIANT(runs[index].volume_index == index % 2);
    MA_INVARIANT(runs[index].nbytes == (index < 4 ? kStripe : kBlock));
  }
}

void neighbours_on_one_lane_are_one_run() {
  const std::vector<VolumeRoom> rooms{{3, kPlenty, 0}, {1, kPlenty, 0}};
  const auto runs = deal(8 * kStripe, kStripe, rooms);
  MA_INVARIANT(runs.size() < 6);
  MA_INVARIANT((sums(runs, 2) == std::vector<std::uint64_t>{6 * kStripe, 2 * kStripe}));
}

void who_is_ahead_comes_later() {
  const std::vector<VolumeRoom> rooms{{1, kPlenty, double{kStripe}}, {1, kPlenty, 0}};
  MA_INVARIANT(deal(kStripe, kStripe, rooms).front().volume_index == 1);
}

void what_one_has_no_room_for_goes_to_the_others() {
  const std::vector<VolumeRoom> rooms{{1, kStripe + kBlock, 0}, {1, kPlenty, 0}, {1, 0, 0}};
  MA_INVARIANT((sums(deal(10 * kStripe, kStripe, rooms), 3) ==
                std::vector<std::uint64_t>{kStripe, 9 * kStripe, 0}));
  const std::vector<VolumeRoom> tight{{1, kStripe + kBlock, 0}, {1, kStripe + kBlock, 0}};
  MA_INVARIANT((sums(deal(2 * kStripe + 2 * kBlock, kStripe, tight), 2) ==
                std::vector<std::uint64_t>{kStripe + kBlock, kStripe + kBlock}));
  MA_INVARIANT(deal(2 * kStripe + 3 * kBlock, kStripe, tight).empty());
}

void random_lanes_get_their_shares(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<VolumeRoom> rooms;
  double weights = 0;
  bool plenty = true;
  std::uint64_t room = 0;
  for (std::uint64_t count = 1 + random() % 4; count > 0; --count) {
    const bool narrow = random() % 3 == 0;
    plenty = plenty && !narrow;
    rooms.push_back({0.25 * static_cast<double>(1 + random() % 20),
                     narrow ? random() % 5000 * kBlock : kPlenty, 0});
    weights += rooms.back().weight;
    room += rooms.back().room_bytes;
  }
  const std::uint64_t nbytes = (1 + random() % 30'000) * kBlock;
  const auto runs = deal(nbytes, kStripe, rooms);
  MA_INVARIANT(runs.empty() == (room < nbytes));
  if (runs.empty()) return;
  const auto shares = sums(runs, rooms.size());
  std::uint64_t total = 0;
  for (std::size_t index = 0; index < rooms.size(); ++index) {
    total += shares[index];
    MA_INVARIANT(shares[index] <= rooms[index].room_bytes);
    const double ideal = static_cast<double>(nbytes) * rooms[index].weight / weights;
    const double off = std::abs(static_cast<double>(shares[index]) - ideal);
    MA_INVARIANT(!plenty || off <= static_cast<double>(rooms.size() * kStripe));
  }
  MA_INVARIANT(total == nbytes);
  for (std::size_t index = 1; index < runs.size(); ++index) {
    MA_INVARIANT(runs[index].volume_index != runs[index - 1].volume_index);
    MA_INVARIANT(runs[index].nbytes > 0);
  }
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::equal_lanes_take_turns();
  memascend::neighbours_on_one_lane_are_one_run();
  memascend::who_is_ahead_comes_later();
  memascend::what_one_has_no_room_for_goes_to_the_others();
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    memascend::random_lanes_get_their_shares(seed);
  }
  return 0;
}

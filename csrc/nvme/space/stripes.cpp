#include "nvme/space/stripes.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace memascend {
namespace {

/// The state of a volume while a key is dealt.
struct Hand {
  double weight;
  std::uint64_t room_bytes;
  double held_bytes;
};

// The hand with space for `nbytes` and the least bytes for its weight, or hands.size().
std::size_t next_hand(const std::vector<Hand>& hands, std::uint64_t nbytes) {
  std::size_t best = hands.size();
  double best_load = 0;
  for (std::size_t index = 0; index < hands.size(); ++index) {
    const Hand& hand = hands[index];
    if (hand.room_bytes < nbytes) continue;
    const double load = (hand.held_bytes + static_cast<double>(nbytes)) / hand.weight;
    if (best < hands.size() && load >= best_load) continue;
    best = index;
    best_load = load;
  }
  return best;
}

std::size_t roomiest_hand(const std::vector<Hand>& hands) {
  const auto most = std::max_element(
      hands.begin(), hands.end(),
      [](const Hand& left, const Hand& right) { return left.room_bytes < right.room_bytes; });
  return static_cast<std::size_t>(most - hands.begin());
}

}  // namespace

std::vector<StripeRun> deal(std::uint64_t nbytes, std::uint64_t stripe_bytes,
                            std::span<const VolumeRoom> rooms) {
  MA_INVARIANT(stripe_bytes > 0);
  std::vector<Hand> hands;
  std::uint64_t room_bytes = 0;  // up to nbytes, so that it cannot wrap
  for (const VolumeRoom& room : rooms) {
    MA_INVARIANT(room.weight > 0);
    hands.push_back({room.weight, room.room_bytes, room.lead_bytes});
    room_bytes += std::min(nbytes - room_bytes, room.room_bytes);
  }
  if (room_bytes < nbytes) return {};
  std::vector<StripeRun> runs;
  while (nbytes > 0) {
    std::uint64_t part = std::min(stripe_bytes, nbytes);
    std::size_t index = next_hand(hands, part);
    if (index == hands.size()) {
      index = roomiest_hand(hands);
      part = hands[index].room_bytes;
    }
    hands[index].room_bytes -= part;
    hands[index].held_bytes += static_cast<double>(part);
    nbytes -= part;
    if (!runs.empty() && runs.back().volume_index == index) {
      runs.back().nbytes += part;
    } else {
      runs.push_back({index, part});
    }
  }
  return runs;
}

}  // namespace memascend

// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
// Space over several volumes, against a map of blocks: no extent shares a byte with another,
// weights and capacities are kept, and everything comes back.
#include "nvme/space/space.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kStripe = 16 * kBlock;

Space make_space(const std::vector<std::uint64_t>& capacities, std::vector<double> weights) {
  std::vector<Volume> volumes;
  for (const std::uint64_t capacity : capacities) {
    volumes.push_back(Volume::open_in_memory(capacity, join("m", volumes.size())));
  }
  return Space(std::move(volumes), {4 * kStripe, kStripe, std::move(weights)});
}

std::vector<std::uint64_t> shares(const std::vector<Extent>& extents, std::size_t volume_count) {
  std::vector<std::uint64_t> result(volume_count, 0);
  std::uint64_t key_offset = 0;
  for (const Extent& extent : extents) {
    MA_INVARIANT(extent.key_offset == key_offset);
    key_offset += extent.nbytes;
    result[static_cast<std::size_t>(extent.volume_index)] += extent.nbytes;
  }
  return result;
}

void one_volume_has_no_stripes() {
  Space space = make_space({256 * kStripe}, {});
  const auto extents = space.take("k", 100 * kStripe + 1);
  MA_INVARIANT(extents.size() == 1);
  MA_INVARIANT(extents.front().offset == 0);
  MA_INVARIANT(extents.front().nbytes == 100 * kStripe + kBlock);
}

void small_keys_stay_whole_and_balance() {
  Space space = make_space({256 * kStripe, 256 * kStripe}, {3, 1});
  for (int turn = 0; turn < 64; ++turn) {
    MA_INVARIANT(space.take("k", 2 * kStripe - kBlock).size() == 1);
  }
  const double ratio =
      static_cast<double>(space.used_bytes(0)) / static_cast<double>(space.used_bytes(1));
  MA_INVARIANT(std::abs(ratio - 3) < 0.3);
}

void large_keys_are_cut_by_weight() {
  Space space = make_space({256 * kStripe, 256 * kStripe, 256 * kStripe}, {1, 2, 1});
  const auto extents = space.take("k", 64 * kStripe);
  MA_INVARIANT(
      (shares(extents, 3) == std::vector<std::uint64_t>{16 * kStripe, 32 * kStripe, 16 * kStripe}));
  // Any part of a few stripes touches every volume.
  for (std::size_t index = 0; index + 4 < extents.size(); ++index) {
    std::set<int> touched;
    for (std::size_t next = index; next < index + 4; ++next) {
      touched.insert(extents[next].volume_index);
    }
    MA_INVARIANT(touched.size() == 3);
  }
}

void a_volume_that_is_full_leaves_the_rest_to_the_others() {
  Space space = make_space({4 * kStripe, 64 * kStripe}, {});
  MA_INVARIANT((shares(space.take("k", 40 * kStripe), 2) ==
                std::vector<std::uint64_t>{4 * kStripe, 36 * kStripe}));
  MA_INVARIANT(space.available_bytes() == 28 * kStripe);
  try {
    space.take("wide", 28 * kStripe + 1);
    MA_INVARIANT(false && "there was room");
  } catch (const StoreFullError& error) {
    const std::string text = error.what();
    MA_INVARIANT(text.find("m0: 262144 bytes used, 0 bytes available") != std::string::npos);
    MA_INVARIANT(text.find("m1: 2359296 bytes used, 1835008 bytes available") != std::string::npos);
    MA_INVARIANT(text.find("capacity of 262144 bytes") != std::string::npos);
    MA_INVARIANT(error.place().volume == "m0, m1");
  }
  MA_INVARIANT(space.available_bytes() == 28 * kStripe);
  space.take("fits", 28 * kStripe);
  MA_INVARIANT(space.available_bytes() == 0);
}

void a_key_that_fits_nowhere_whole_is_cut() {
  Space space = make_space({kStripe, kStripe}, {});
  MA_INVARIANT(space.take("k", 2 * kStripe - kBlock).size() == 2);
}

// In a file, as one in memory takes what it needs whenever it is written.
void what_is_free_goes_back_to_the_file_system_and_is_taken_again() {
  std::vector<Volume> volumes;
  volumes.push_back(Volume::open_anonymous("."));
  const int descriptor = volumes.front().descriptor();
  const auto stored_bytes = [&] {
    struct stat state{};
    MA_INVARIANT(::fstat(descriptor, &state) == 0);
    return static_cast<std::uint64_t>(state.st_blocks) * 512;
  };
  Space space(std::move(volumes), {kStripe, kStripe, {}});
  const auto first = space.take("first", 64 * kStripe);
  const auto last = space.take("last", 16 * kStripe);
  space.give(first);
  const std::uint64_t full_bytes = stored_bytes();
  MA_INVARIANT(full_bytes >= 80 * kStripe);
  space.shrink();
  if (space.reserved_bytes() > space.used_bytes()) return;  // no holes in this file system
  MA_INVARIANT(stored_bytes() <= full_bytes - 64 * kStripe + kBlock);
  MA_INVARIANT(space.reserved_bytes() == 16 * kStripe);
  const auto again = space.take("again", 32 * kStripe);
  MA_INVARIANT(again.size() == 1);
  MA_INVARIANT(again.front().offset == first.front().offset);
  MA_INVARIANT(stored_bytes() >= 48 * kStripe);
}

class Model {
 public:
  explicit Model(std::uint64_t seed) : random_(seed), space_(make(random_, &capacity_)) {}

  void run() {
    for (int turn = 0; turn < 300; ++turn) {
      const auto choice = random_() % 16;
      if (choice == 0) {
        shrink();
      } else if (choice < 10) {
        take();
      } else {
        give();
      }
    }
    while (!keys_.empty()) give();
    MA_INVARIANT(space_.available_bytes() == capacity_);
    MA_INVARIANT(space_.used_bytes() == 0);
  }

 private:
  static Space make(std::mt19937_64& random, std::uint64_t* capacity) {
    std::vector<std::uint64_t> capacities;
    std::vector<double> weights;
    *capacity = 0;
    for (std::uint64_t count = 1 + random() % 4; count > 0; --count) {
      capacities.push_back((8 + random() % 400) * kBlock);
      weights.push_back(0.5 * static_cast<double>(1 + random() % 8));
      *capacity += capacities.back();
    }
    return make_space(capacities, weights);
  }

  void take() {
    const std::uint64_t nbytes = 1 + random_() % (200 * kBlock);
    const std::uint64_t rounded = (nbytes + kBlock - 1) / kBlock * kBlock;
    const std::uint64_t available = space_.available_bytes();
    std::vector<Extent> extents;
    try {
      extents = space_.take("k", nbytes);
    } catch (const StoreFullError&) {
      MA_INVARIANT(rounded > available);
      MA_INVARIANT(space_.available_bytes() == available);
      return;
    }
    MA_INVARIANT(rounded <= available);
    MA_INVARIANT(space_.available_bytes() == available - rounded);
    std::uint64_t sum = 0;
    for (const Extent& extent : extents) {
      sum += extent.nbytes;
      for (std::uint64_t at = 0; at < extent.nbytes; at += kBlock) {
        MA_INVARIANT(taken_.emplace(extent.volume_index, extent.offset + at).second);
      }
    }
    MA_INVARIANT(sum == rounded);
    for (std::size_t index = 1; index < extents.size(); ++index) {
      const Extent& last = extents[index - 1];
      MA_INVARIANT(last.volume_index != extents[index].volume_index ||
                   last.offset + last.nbytes != extents[index].offset);
    }
    keys_.push_back(std::move(extents));
  }

  void give() {
    if (keys_.empty()) return;
    std::swap(keys_[random_() % keys_.size()], keys_.back());
    for (const Extent& extent : keys_.back()) {
      for (std::uint64_t at = 0; at < extent.nbytes; at += kBlock) {
        taken_.erase({extent.volume_index, extent.offset + at});
      }
    }
    space_.give(keys_.back());
    keys_.pop_back();
  }

  void shrink() {
    const std::uint64_t available = space_.available_bytes();
    space_.shrink();
    MA_INVARIANT(space_.available_bytes() == available);
    MA_INVARIANT(space_.reserved_bytes() == space_.used_bytes());
    MA_INVARIANT(space_.used_bytes() == taken_.size() * kBlock);
  }

  std::mt19937_64 random_;
  std::uint64_t capacity_ = 0;
  Space space_;
  std::vector<std::vector<Extent>> keys_;
  std::set<std::pair<int, std::uint64_t>> taken_;
};

}  // namespace
}  // namespace memascend

int main() {
  memascend::one_volume_has_no_stripes();
  memascend::small_keys_stay_whole_and_balance();
  memascend::large_keys_are_cut_by_weight();
  memascend::a_volume_that_is_full_leaves_the_rest_to_the_others();
  memascend::a_key_that_fits_nowhere_whole_is_cut();
  memascend::what_is_free_goes_back_to_the_file_system_and_is_taken_again();
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    memascend::Model(seed).run();
  }
  return 0;
}

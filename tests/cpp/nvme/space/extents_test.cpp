// sources: csrc/nvme/space/extents.cpp
// Free extents against a plain map of blocks, in random order.
#include "nvme/space/extents.hpp"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kBlock = 4096;

class Model {
 public:
  explicit Model(std::uint64_t seed) : random_(seed), free_(0, kBlock) {}

  void step() {
    const std::uint64_t what = random_() % 10;
    if (what < 4) return take(false);
    if (what < 5) return take(true);
    if (what < 9) return give();
    grow();
  }

  void give_all() {
    while (!taken_.empty()) give();
    MA_INVARIANT(free_.free_bytes() == used_.size() * kBlock);
    // Everything is free again, so it must be one run.
    MA_INVARIANT(used_.empty() || free_.take(used_.size() * kBlock).has_value());
  }

 private:
  void grow() {
    const std::uint64_t count = 1 + random_() % 64;
    free_.give({0, used_.size() * kBlock, count * kBlock});
    used_.resize(used_.size() + count, false);
    check();
  }

  void take(bool scattered) {
    const std::uint64_t nbytes = (1 + random_() % 24) * kBlock;
    std::vector<Extent> extents;
    if (scattered) {
      extents = free_.take_scattered(nbytes);
      MA_INVARIANT(extents.empty() == (nbytes > free_count() * kBlock));
    } else if (const auto extent = free_.take(nbytes)) {
      extents.push_back(*extent);
    } else {
      MA_INVARIANT(longest_free_run() * kBlock < nbytes);
    }
    std::uint64_t sum = 0;
    for (const Extent& extent : extents) {
      sum += extent.nbytes;
      mark(extent, true);
      taken_.push_back(extent);
    }
    MA_INVARIANT(sum == nbytes || extents.empty());
    check();
  }

  void give() {
    if (taken_.empty()) return;
    std::swap(taken_[random_() % taken_.size()], taken_.back());
    mark(taken_.back(), false);
    free_.give(taken_.back());
    taken_.pop_back();
    check();
  }

  void mark(const Extent& extent, bool used) {
    for (std::uint64_t at = extent.offset; at < extent.offset + extent.nbytes; at += kBlock) {
      MA_INVARIANT(used_[at / kBlock] != used);  // neither taken twice nor freed twice
      used_[at / kBlock] = used;
    }
  }

  std::uint64_t free_count() const {
    return static_cast<std::uint64_t>(std::count(used_.begin(), used_.end(), false));
  }

  std::uint64_t longest_free_run() const {
    std::uint64_t longest = 0;
    std::uint64_t run = 0;
    for (const bool used : used_) {
      run = used ? 0 : run + 1;
      longest = std::max(longest, run);
    }
    return longest;
  }

  void check() const {
    MA_INVARIANT(free_.is_valid());
    MA_INVARIANT(free_.free_bytes() == free_count() * kBlock);
    std::uint64_t tail = 0;
    while (tail < used_.size() && !used_[used_.size() - 1 - tail]) ++tail;
    MA_INVARIANT(free_.free_bytes_before(used_.size() * kBlock) == tail * kBlock);
  }

  std::mt19937_64 random_;
  FreeExtents free_;
  std::vector<bool> used_;  // by block
  std::vector<Extent> taken_;
};

}  // namespace
}  // namespace memascend

int main() {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    memascend::Model model(seed);
    for (int step = 0; step < 500; ++step) model.step();
    model.give_all();
  }
  return 0;
}

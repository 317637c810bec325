#include "nvme/space/extents.hpp"

#include <algorithm>
#include <iterator>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {

FreeExtents::FreeExtents(int volume_index, std::uint64_t alignment_bytes)
    : volume_index_(volume_index), alignment_bytes_(alignment_bytes) {
  MA_INVARIANT(is_power_of_two(alignment_bytes));
}

std::optional<Extent> FreeExtents::take(std::uint64_t nbytes) {
  MA_INVARIANT(nbytes > 0);
  MA_INVARIANT(is_aligned(nbytes, alignment_bytes_));
  const auto best = by_nbytes_.lower_bound({nbytes, 0});
  if (best == by_nbytes_.end()) return std::nullopt;
  return take_from(best->second, nbytes);
}

std::vector<Extent> FreeExtents::take_scattered(std::uint64_t nbytes) {
  MA_INVARIANT(is_aligned(nbytes, alignment_bytes_));
  std::vector<Extent> taken;
  if (nbytes > free_bytes_) return taken;
  while (nbytes > 0) {
    const auto [run_nbytes, offset] = *by_nbytes_.rbegin();
    taken.push_back(take_from(offset, std::min(run_nbytes, nbytes)));
    nbytes -= taken.back().nbytes;
  }
  return taken;
}

void FreeExtents::give(const Extent& extent) {
  MA_INVARIANT(extent.volume_index == volume_index_);
  MA_INVARIANT(extent.nbytes > 0);
  MA_INVARIANT(is_aligned(extent.offset | extent.nbytes, alignment_bytes_));
  std::uint64_t offset = extent.offset;
  std::uint64_t end = extent.offset + extent.nbytes;
  const auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.begin()) {
    const auto previous = std::prev(next);
    const std::uint64_t previous_end = previous->first + previous->second;
    MA_INVARIANT(previous_end <= offset);
    if (previous_end == offset) {
      offset = previous->first;
      erase(previous);
    }
  }
  if (next != by_offset_.end()) {
    MA_INVARIANT(end <= next->first);
    if (end == next->first) {
      end += next->second;
      erase(next);
    }
  }
  insert(offset, end - offset);
  MA_INVARIANT_SLOW(is_valid());
}

std::uint64_t FreeExtents::free_bytes_before(std::uint64_t end) const {
  if (by_offset_.empty()) return 0;
  const auto& [offset, nbytes] = *by_offset_.rbegin();
  return offset + nbytes == end ? nbytes : 0;
}

bool FreeExtents::is_valid() const {
  std::uint64_t total = 0;
  std::uint64_t previous_end = 0;
  bool first = true;
  for (const auto& [offset, nbytes] : by_offset_) {
    if (nbytes == 0 || !is_aligned(offset | nbytes, alignment_bytes_)) return false;
    if (!first && offset <= previous_end) return false;  // equal: neighbours left apart
    if (!by_nbytes_.contains({nbytes, offset})) return false;
    previous_end = offset + nbytes;
    total += nbytes;
    first = false;
  }
  return by_nbytes_.size() == by_offset_.size() && total == free_bytes_;
}

void FreeExtents::insert(std::uint64_t offset, std::uint64_t nbytes) {
  by_offset_.emplace(offset, nbytes);
  by_nbytes_.emplace(nbytes, offset);
  free_bytes_ += nbytes;
}

void FreeExtents::erase(std::map<std::uint64_t, std::uint64_t>::iterator run) {
  free_bytes_ -= run->second;
  by_nbytes_.erase({run->second, run->first});
  by_offset_.erase(run);
}

Extent FreeExtents::take_from(std::uint64_t offset, std::uint64_t nbytes) {
  const auto run = by_offset_.find(offset);
  const std::uint64_t rest = run->second - nbytes;
  erase(run);
  if (rest > 0) insert(offset + nbytes, rest);
  MA_INVARIANT_SLOW(is_valid());
  return {volume_index_, offset, nbytes};
}

}  // namespace memascend

#include "nvme/transfer/pieces.hpp"

#include <algorithm>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {
namespace {

// A bounced piece for [start, end) on the volume.
Piece bounced(const Piece& whole, std::uint64_t start, std::uint64_t end, std::uint64_t block) {
  Piece piece = whole;
  piece.bounced = true;
  piece.wanted_offset = start;
  piece.wanted_end = end;
  piece.offset = align_down(start, block);
  piece.end = align_up(end, block);
  piece.data = whole.data + (start - whole.wanted_offset);
  piece.keeps_tail = whole.keeps_tail || end != whole.wanted_end;
  return piece;
}

// Cuts the part of a range on one extent. `slack_bytes` of memory behind it may be used.
void cut_one(const Piece& whole, std::uint64_t slack_bytes, bool reads, const Alignment& alignment,
             std::vector<Piece>* pieces) {
  const std::uint64_t block = alignment.offset_bytes;
  const std::uint64_t middle = align_up(whole.wanted_offset, block);
  std::uint64_t middle_end = align_down(whole.wanted_end, block);
  const std::uint64_t rounded_end = align_up(whole.wanted_end, block);
  // With slack in memory the tail needs no bounce, unless a write would overwrite the next bytes.
  const bool tail_fits = rounded_end - whole.wanted_end <= slack_bytes;
  if (tail_fits && (reads || !whole.keeps_tail)) middle_end = rounded_end;

  const std::byte* middle_data = whole.data + (middle - whole.wanted_offset);
  if (middle >= middle_end || !is_aligned(middle_data, alignment.memory_bytes)) {
    pieces->push_back(bounced(whole, whole.wanted_offset, whole.wanted_end, block));
    return;
  }
  if (whole.wanted_offset < middle) {
    pieces->push_back(bounced(whole, whole.wanted_offset, middle, block));
  }
  Piece direct = whole;
  direct.wanted_offset = middle;
  direct.wanted_end = std::min(middle_end, whole.wanted_end);
  direct.offset = middle;
  direct.end = middle_end;
  direct.data = whole.data + (middle - whole.wanted_offset);
  pieces->push_back(direct);
  if (middle_end < whole.wanted_end) {
    pieces->push_back(bounced(whole, middle_end, whole.wanted_end, block));
  }
}

}  // namespace

Wanted wanted_part(const Piece& piece, std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t begin = std::max(offset, piece.wanted_offset);
  const std::uint64_t end = std::min(offset + nbytes, piece.wanted_end);
  return {begin, end, piece.data + (begin - piece.wanted_offset)};
}

std::vector<Piece> cut(const KeyRange& range, std::span<const Extent> extents,
                       const Alignment& alignment) {
  MA_INVARIANT(range.capacity_bytes >= range.nbytes);
  const std::uint64_t range_end = range.offset + range.nbytes;
  // Binary search: a key of many gigabytes on several volumes has thousands of extents.
  const auto first = std::upper_bound(
      extents.begin(), extents.end(), range.offset,
      [](std::uint64_t offset, const Extent& extent) { return offset < extent.key_offset; });
  std::vector<Piece> pieces;
  std::uint64_t start = range.offset;
  for (auto extent = std::prev(first); start < range_end; ++extent) {
    MA_INVARIANT(extent != extents.end());
    const std::uint64_t end = std::min(range_end, extent->key_offset + extent->nbytes);
    Piece whole{};
    whole.volume_index = extent->volume_index;
    whole.keeps_tail = end != range.key_nbytes;  // after the key's end there is only padding
    whole.wanted_offset = extent->offset + (start - extent->key_offset);
    whole.wanted_end = extent->offset + (end - extent->key_offset);
    whole.data = range.data + (start - range.offset);
    const std::uint64_t slack_bytes = end == range_end ? range.capacity_bytes - range.nbytes : 0;
    cut_one(whole, slack_bytes, range.operation == Operation::kRead, alignment, &pieces);
    start = end;
  }
  return pieces;
}

}  // namespace memascend

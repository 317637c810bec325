// sources: csrc/nvme/transfer/pieces.cpp
// Every way to cut small ranges: all wanted bytes once, in the right place, and nothing unaligned.
#include "nvme/transfer/pieces.hpp"

#include <algorithm>
#include <vector>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {
namespace {

constexpr Alignment kAlignment{8, 4};  // small, so that all cases can be tried
constexpr std::uint64_t kKeyBytes = 37;
const std::vector<Extent> kExtents{{0, 64, 16, 0}, {1, 8, 8, 16}, {0, 0, 16, 24}};

// The place on the volumes of a byte of the key.
std::pair<int, std::uint64_t> place_of(std::uint64_t at) {
  for (const Extent& extent : kExtents) {
    if (at < extent.nbytes) return {extent.volume_index, extent.offset + at};
    at -= extent.nbytes;
  }
  MA_INVARIANT(false && "within the key");
}

void check_piece(const Piece& piece, const KeyRange& range) {
  MA_INVARIANT(is_aligned(piece.offset | piece.end, kAlignment.offset_bytes));
  MA_INVARIANT(piece.offset <= piece.wanted_offset);
  MA_INVARIANT(piece.wanted_offset < piece.wanted_end);
  MA_INVARIANT(piece.wanted_end <= piece.end);
  if (piece.bounced) return;
  MA_INVARIANT(piece.offset == piece.wanted_offset);
  MA_INVARIANT(is_aligned(piece.data, kAlignment.memory_bytes));
  const std::byte* moved_end = piece.data + (piece.end - piece.offset);
  MA_INVARIANT(moved_end <= range.data + range.capacity_bytes);
  // What is written behind the wanted bytes must be padding of the key.
  const bool spoils = range.operation == Operation::kWrite && piece.end > piece.wanted_end;
  MA_INVARIANT(!spoils || range.offset + range.nbytes == range.key_nbytes);
}

void check(const KeyRange& range) {
  const std::vector<Piece> pieces = cut(range, kExtents, kAlignment);
  std::uint64_t at = range.offset;
  for (const Piece& piece : pieces) {
    check_piece(piece, range);
    MA_INVARIANT(piece.data == range.data + (at - range.offset));
    for (std::uint64_t byte = piece.wanted_offset; byte < piece.wanted_end; ++byte, ++at) {
      MA_INVARIANT((place_of(at) == std::pair{piece.volume_index, byte}));
    }
    const bool at_key_end = at == range.key_nbytes;
    MA_INVARIANT(piece.keeps_tail || at_key_end || is_aligned(piece.wanted_end, 8));
  }
  MA_INVARIANT(at == range.offset + range.nbytes);
}

}  // namespace
}  // namespace memascend

int main() {
  using namespace memascend;
  alignas(64) std::byte memory[128];
  for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
    for (std::uint64_t offset = 0; offset < kKeyBytes; ++offset) {
      for (std::uint64_t nbytes = 1; offset + nbytes <= kKeyBytes; ++nbytes) {
        for (std::uint64_t shift = 0; shift < 8; ++shift) {
          for (const std::uint64_t slack : {0, 1, 3, 7, 8}) {
            check({operation, kKeyBytes, offset, nbytes, memory + shift, nbytes + slack});
          }
        }
      }
    }
  }
  return 0;
}

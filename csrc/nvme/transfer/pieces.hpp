// Pieces: a transfer cut along extents, blocks and memory alignment. Pure arithmetic.
//
// A run that direct I/O can move in place becomes a direct piece. Unaligned heads and tails, and a
// whole transfer with an unaligned memory address, become bounced pieces: they go through an
// aligned bounce buffer, so that no other byte is changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "nvme/engine/request.hpp"
#include "nvme/space/extents.hpp"
#include "system/volume.hpp"

namespace memascend {

/// A run that is contiguous on one volume and in memory.
struct Piece {
  int volume_index;
  bool bounced;
  bool keeps_tail;              // a write must keep the bytes after wanted_end in the last block
  std::uint64_t wanted_offset;  // on the volume: the bytes asked for
  std::uint64_t wanted_end;
  std::uint64_t offset;  // on the volume: rounded out to blocks, as the device moves it
  std::uint64_t end;
  std::byte* data;  // memory of wanted_offset
};

/// The wanted bytes within a range that the device moves.
struct Wanted {
  std::uint64_t begin;  // on the volume
  std::uint64_t end;
  std::byte* data;  // the caller's memory of `begin`
};
Wanted wanted_part(const Piece& piece, std::uint64_t offset, std::uint64_t nbytes);

/// A part of a key, and its memory.
struct KeyRange {
  Operation operation;
  std::uint64_t key_nbytes;
  std::uint64_t offset;  // in the key
  std::uint64_t nbytes;
  std::byte* data;
  std::uint64_t capacity_bytes;  // usable memory from `data` on; at least nbytes
};

/// Cuts `range` of a key stored on `extents`, whose offsets and sizes are multiples of
/// `alignment.offset_bytes` and whose key_offset is set. Pre: offset + nbytes <= key_nbytes <= sum
/// of the extents.
std::vector<Piece> cut(const KeyRange& range, std::span<const Extent> extents,
                       const Alignment& alignment);

}  // namespace memascend

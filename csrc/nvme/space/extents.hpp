// A part of a volume, as a plain value that all code about volumes shares.
#pragma once

#include <cstdint>

namespace memascend {

/// A run of bytes on a volume.
struct Extent {
  int volume_index;
  std::uint64_t offset;
  std::uint64_t nbytes;
  std::uint64_t key_offset = 0;  // offset of its first byte in its key
};

}  // namespace memascend

// A part of a volume, as everything that knows volumes names it. No behaviour, no ownership.
#pragma once

#include <cstdint>

namespace memascend {

/// A run of bytes on a volume.
struct Extent {
  int volume_index;
  std::uint64_t offset;
  std::uint64_t nbytes;
  std::uint64_t key_offset = 0;  // of its first byte in the key that has it
};

}  // namespace memascend

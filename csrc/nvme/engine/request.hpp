// The plain values that cross the engine interface. No behaviour, no ownership.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memascend {

enum class Operation : std::uint8_t { kRead, kWrite };

/// One contiguous transfer between memory and a volume. `data`, `offset` and `nbytes` obey the
/// volume's alignment rules; the memory stays valid until the completion with the same tag is
/// reaped.
struct Request {
  Operation operation;
  std::uint64_t offset;  // first byte on the volume
  std::uint64_t nbytes;
  std::byte* data;
  std::uint64_t tag;  // chosen by the submitter, returned in the completion
};

/// The outcome of a request. Engines report; they never interpret, retry or throw for one request.
struct Completion {
  std::uint64_t tag;
  std::int64_t result;  // bytes transferred (may be short, 0 at the end of the volume), or -errno
};

}  // namespace memascend

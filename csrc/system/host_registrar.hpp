// HostRegistrar: page-locks host memory for a device. Knows addresses and bytes; never knows
// arenas. An arena has at most one, and calls it from one thread at a time.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace memascend {

class HostRegistrar {
 public:
  virtual ~HostRegistrar() = default;

  /// Registers a range as a whole: the device refuses a copy across two registrations. Returns an
  /// empty text, or the error; then nothing is registered, and a later call may succeed.
  virtual std::string register_memory(std::span<std::byte> range) = 0;

  /// Unregisters exactly such a range once the device is idle: a copy may still be in flight, and
  /// the memory is unmapped next. Errors are ignored, also those of the wait: at the end of the
  /// process the device may be gone first, and its registrations with it. Does nothing in a forked
  /// child, which has neither.
  virtual void unregister_memory(std::span<std::byte> range) noexcept = 0;

  /// As unregister_memory, for memory that the process will reuse. Returns an empty text, or the
  /// error; then the range is still registered. Pre: not in a forked child.
  virtual std::string try_unregister_memory(std::span<std::byte> range) = 0;
};

}  // namespace memascend

// CudaDriver: the few functions of libcuda that page-lock host memory for the device.
//
// Reached through dlopen, so nothing links CUDA. Never initialises CUDA and never makes a context:
// registration is for processes where torch has done both. Knows nothing of arenas.
// Thread-safe: the driver is, and the object does not change after open().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace memascend {

/// The driver is known to fail on single registrations above this size.
inline constexpr std::uint64_t kRegistrationBytesMax = std::uint64_t{64} << 30;

class CudaDriver {
 public:
  /// Loads the driver and remembers the calling thread's current context; later calls from any
  /// thread run in it. Null, with the reason in `reason`, when there is no library or no context.
  static std::unique_ptr<CudaDriver> open(const std::string& library, std::uint64_t chunk_bytes,
                                          std::string& reason);
  ~CudaDriver();
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  /// Registers a range, portable to all contexts, in chunks of at most `chunk_bytes`. Returns an
  /// empty text, or what failed; then the chunks already registered have been taken back.
  std::string register_memory(std::span<std::byte> range) const;

  /// Takes back what register_memory did for exactly this range. Failures are ignored: when the
  /// process ends the driver may be gone first, and it drops the registrations by itself.
  void unregister_memory(std::span<std::byte> range) const noexcept;

  /// As unregister_memory, for memory that the process will put to another use: waits until the
  /// device is idle, as a copy may still be in flight. Returns an empty text, or what failed; then
  /// the chunks that had already gone have been registered again, or the text has that failure
  /// too.
  std::string try_unregister_memory(std::span<std::byte> range) const;

 private:
  struct Functions;
  CudaDriver() = default;

  void* library_ = nullptr;
  void* context_ = nullptr;
  std::uint64_t chunk_bytes_ = kRegistrationBytesMax;
  std::unique_ptr<Functions> functions_;
};

}  // namespace memascend

// What can go wrong above the operating system: the C++ side of StoreError, StoreFullError,
// CorruptionError and EngineUnavailableError in memascend/errors.py.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "nvme/engine/request.hpp"

namespace memascend {

/// Checksums of bytes that are not what was written.
struct Corruption {
  std::uint32_t expected;
  std::uint32_t found;
};

/// Where an error happened; what a StoreError carries as attributes.
struct ErrorPlace {
  std::string key;           // empty when the failure is not about one key
  std::string volume;        // directory of the volume
  std::uint64_t offset = 0;  // first byte on the volume
  std::uint64_t nbytes = 0;
  int code = 0;                                         // errno, 0 when the device ended early
  std::optional<Corruption> corruption = std::nullopt;  // no call failed: the bytes are wrong
};

/// Why a drive answers with this errno (0: it ended early), and what to do: the last two lines of a
/// message.
std::string describe_cause(int code);

/// The message of a failed transfer: what failed, with what values, why, and what to do.
/// `recovery` is what to do about bytes that are wrong, in words of whoever knows.
std::string describe(Operation operation, const ErrorPlace& place, const std::string& recovery);

/// A read or write of the store failed.
class StoreError : public std::runtime_error {
 public:
  StoreError(const std::string& message, ErrorPlace place)
      : std::runtime_error(message), place_(std::move(place)) {}
  const ErrorPlace& place() const noexcept { return place_; }

 private:
  ErrorPlace place_;
};

/// No volume can hold what is to be reserved. Nothing was changed.
class StoreFullError : public StoreError {
 public:
  using StoreError::StoreError;
};

/// Bytes on a volume, or read back from it, are not those that were written there.
class CorruptionError : public StoreError {
 public:
  using StoreError::StoreError;
};

/// Throws a CorruptionError where the place is one, else a StoreError.
[[noreturn]] void throw_store_error(const std::string& message, const ErrorPlace& place);

/// The engine asked for by name cannot run here.
class EngineUnavailableError : public std::runtime_error {
 public:
  EngineUnavailableError(const std::string& message, int code)
      : std::runtime_error(message), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

}  // namespace memascend

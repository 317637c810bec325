// Errors above the operating system: the C++ side of StoreError, StoreFullError,
// CorruptionError and EngineUnavailableError in memascend/errors.py.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "nvme/engine/request.hpp"

namespace memascend {

/// The checksums of corrupted data.
struct Corruption {
  std::uint32_t expected;
  std::uint32_t found;
};

/// The place of an error; a StoreError has these as attributes.
struct ErrorPlace {
  std::string key;           // empty if the error is not about one key
  std::string volume;        // directory of the volume
  std::uint64_t offset = 0;  // first byte on the volume
  std::uint64_t nbytes = 0;
  int code = 0;                                         // errno, 0 if the device ended early
  std::optional<Corruption> corruption = std::nullopt;  // set if only the bytes are wrong
};

/// The likely cause of this errno from a drive (0: it ended early) and the remedy: the last two
/// lines of a message.
std::string describe_cause(int code);

/// The message of a failed transfer: the failure, its values, the likely cause, and the remedy.
/// `recovery`: the remedy for corrupted data, in the words of the caller.
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

/// No volume has the space for a reservation. Nothing was changed.
class StoreFullError : public StoreError {
 public:
  using StoreError::StoreError;
};

/// Bytes on a volume, or read back from it, differ from the bytes written there.
class CorruptionError : public StoreError {
 public:
  using StoreError::StoreError;
};

/// Throws a CorruptionError if the place has a corruption, else a StoreError.
[[noreturn]] void throw_store_error(const std::string& message, const ErrorPlace& place);

/// The requested engine cannot run here.
class EngineUnavailableError : public std::runtime_error {
 public:
  EngineUnavailableError(const std::string& message, int code)
      : std::runtime_error(message), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

}  // namespace memascend

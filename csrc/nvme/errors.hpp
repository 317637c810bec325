// What can go wrong above the operating system: the C++ side of StoreError, StoreFullError and
// EngineUnavailableError in memascend/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "nvme/request.hpp"

namespace memascend {

/// Where an error happened; what a StoreError carries as attributes.
struct ErrorPlace {
  std::string key;           // empty when the failure is not about one key
  std::string volume;        // directory of the volume
  std::uint64_t offset = 0;  // first byte on the volume
  std::uint64_t nbytes = 0;
  int code = 0;  // errno, 0 when the device ended early
};

/// Why a drive answers with this errno (0: it ended early), and what to do: the last two lines of a
/// message.
std::string describe_cause(int code);

/// What a failed transfer means to the user: what failed, with what values, why, and what to do.
std::string describe(Operation operation, const ErrorPlace& place);

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

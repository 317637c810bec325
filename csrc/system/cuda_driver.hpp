// CudaDriver: the few functions of libcuda that page-lock host memory for the device.
//
// Loaded with dlopen, so nothing links CUDA. Never initialises CUDA or creates a context: torch
// does both, maybe after this object was made. The runtime's cudaHostRegister would also do, but it
// leaves its error for the next kernel launch to report.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "system/host_registrar.hpp"
#include "system/owner_process.hpp"

namespace memascend {

class CudaDriver : public HostRegistrar {
 public:
  /// Loads the driver. Null, with the reason in `reason`, if the library or a symbol is missing.
  static std::unique_ptr<CudaDriver> open(const std::string& library, std::string& reason);
  ~CudaDriver() override;
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  /// Portable to all contexts. The first call on a thread with a current context stores it, and
  /// later calls from any thread use it; until then registering fails.
  std::string register_memory(std::span<std::byte> range) override;
  void unregister_memory(std::span<std::byte> range) noexcept override;
  std::string try_unregister_memory(std::span<std::byte> range) override;

 private:
  struct Functions;
  CudaDriver() = default;
  /// Returns an empty text once there is a context, else the reason why there is none.
  std::string find_context();

  const OwnerProcess owner_;
  void* library_ = nullptr;
  void* context_ = nullptr;
  std::unique_ptr<Functions> functions_;
};

}  // namespace memascend

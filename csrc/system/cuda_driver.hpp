// CudaDriver: the few functions of libcuda that page-lock host memory for the device.
//
// Reached through dlopen, so nothing links CUDA. Never initialises CUDA and never makes a context:
// registration is for processes where torch has done both, maybe after this object was made. The
// runtime's cudaHostRegister would do as well, but leaves a refusal behind for the next launch of a
// kernel to fail with.
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
  /// Loads the driver. Null, with the reason in `reason`, when there is no such library.
  static std::unique_ptr<CudaDriver> open(const std::string& library, std::string& reason);
  ~CudaDriver() override;
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  /// Portable to all contexts. The first call on a thread that has a current context remembers it,
  /// and later calls from any thread run in it; until then registering fails.
  std::string register_memory(std::span<std::byte> range) override;
  void unregister_memory(std::span<std::byte> range) noexcept override;
  std::string try_unregister_memory(std::span<std::byte> range) override;

 private:
  struct Functions;
  CudaDriver() = default;
  /// An empty text once there is a context, else why there is none.
  std::string find_context();

  const OwnerProcess owner_;
  void* library_ = nullptr;
  void* context_ = nullptr;
  std::unique_ptr<Functions> functions_;
};

}  // namespace memascend

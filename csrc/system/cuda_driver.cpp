#include "system/cuda_driver.hpp"

#include <dlfcn.h>

#include "base/check.hpp"

namespace memascend {
namespace {

// From cuda.h, which is not needed at build time.
constexpr int kSuccess = 0;
constexpr int kNotInitialized = 3;
constexpr unsigned kMemHostRegisterPortable = 1;

/// Looks up a symbol; remembers the first name that is missing.
template <typename Function>
void look_up(void* library, const char* name, Function& target, std::string& missing) {
  target = reinterpret_cast<Function>(dlsym(library, name));
  if (target == nullptr && missing.empty()) missing = name;
}

}  // namespace

struct CudaDriver::Functions {
  int (*register_host)(void*, std::size_t, unsigned) = nullptr;
  int (*unregister_host)(void*) = nullptr;
  int (*get_current)(void**) = nullptr;
  int (*push_current)(void*) = nullptr;
  int (*pop_current)(void**) = nullptr;
  int (*synchronize)() = nullptr;
  int (*error_string)(int, const char**) = nullptr;

  std::string text(int code) const {
    const char* words = nullptr;
    if (error_string(code, &words) != kSuccess || words == nullptr) words = "unknown error";
    return join("CUDA error ", code, ": ", words);
  }
};

std::unique_ptr<CudaDriver> CudaDriver::open(const std::string& library, std::string& reason) {
  std::unique_ptr<CudaDriver> driver(new CudaDriver);
  driver->functions_ = std::make_unique<Functions>();
  driver->library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (driver->library_ == nullptr) {
    const char* words = dlerror();
    reason = words != nullptr ? words : join("cannot load ", library);
    return nullptr;
  }
  Functions& functions = *driver->functions_;
  std::string missing;
  look_up(driver->library_, "cuMemHostRegister_v2", functions.register_host, missing);
  look_up(driver->library_, "cuMemHostUnregister", functions.unregister_host, missing);
  look_up(driver->library_, "cuCtxGetCurrent", functions.get_current, missing);
  look_up(driver->library_, "cuCtxPushCurrent_v2", functions.push_current, missing);
  look_up(driver->library_, "cuCtxPopCurrent_v2", functions.pop_current, missing);
  look_up(driver->library_, "cuCtxSynchronize", functions.synchronize, missing);
  look_up(driver->library_, "cuGetErrorString", functions.error_string, missing);
  if (!missing.empty()) {
    reason = join(library, " has no ", missing);
    return nullptr;
  }
  return driver;
}

CudaDriver::~CudaDriver() {
  // The library stays loaded: torch uses it too, and unloading a driver is not safe.
}

std::string CudaDriver::find_context() {
  if (context_ != nullptr) return {};
  // No cuInit: before CUDA is initialised get_current fails with kNotInitialized, and initialising
  // it here would break a later fork.
  const int code = functions_->get_current(&context_);
  if (code == kSuccess && context_ != nullptr) return {};
  context_ = nullptr;
  if (code != kSuccess && code != kNotInitialized) return functions_->text(code);
  return "this thread has no CUDA context; use the device first";
}

std::string CudaDriver::register_memory(std::span<std::byte> range) {
  std::string failure = find_context();
  if (!failure.empty()) return failure;
  int code = functions_->push_current(context_);
  if (code != kSuccess) return functions_->text(code);
  code = functions_->register_host(range.data(), range.size(), kMemHostRegisterPortable);
  if (code != kSuccess) {
    failure = join("cuMemHostRegister of ", range.size(), " bytes: ", functions_->text(code));
  }
  void* popped = nullptr;
  (void)functions_->pop_current(&popped);
  return failure;
}

void CudaDriver::unregister_memory(std::span<std::byte> range) noexcept {
  if (!owner_.is_current()) return;
  if (functions_->push_current(context_) != kSuccess) return;
  (void)functions_->synchronize();
  (void)functions_->unregister_host(range.data());
  void* popped = nullptr;
  (void)functions_->pop_current(&popped);
}

std::string CudaDriver::try_unregister_memory(std::span<std::byte> range) {
  int code = functions_->push_current(context_);
  if (code != kSuccess) return functions_->text(code);
  code = functions_->synchronize();
  if (code == kSuccess) code = functions_->unregister_host(range.data());
  void* popped = nullptr;
  (void)functions_->pop_current(&popped);
  if (code == kSuccess) return {};
  return join("cuMemHostUnregister: ", functions_->text(code));
}

}  // namespace memascend

#include "system/cuda_driver.hpp"

#include <dlfcn.h>

#include <algorithm>

#include "base/align.hpp"
#include "base/check.hpp"
#include "system/pages.hpp"

namespace memascend {
namespace {

// From cuda.h, which is not needed at build time.
constexpr int kSuccess = 0;
constexpr int kNotInitialized = 3;
constexpr unsigned kMemHostRegisterPortable = 1;

/// Looks a symbol up; remembers the first name that is missing.
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

  /// Drops the chunks that cover [range, range + nbytes).
  void unregister_chunks(std::byte* range, std::uint64_t nbytes, std::uint64_t chunk_bytes) const {
    for (std::uint64_t offset = 0; offset < nbytes; offset += chunk_bytes) {
      (void)unregister_host(range + offset);
    }
  }
};

std::unique_ptr<CudaDriver> CudaDriver::open(const std::string& library, std::uint64_t chunk_bytes,
                                             std::string& reason) {
  MA_EXPECT(chunk_bytes >= kPageBytes, "chunk_bytes must be at least a page, got ", chunk_bytes);
  std::unique_ptr<CudaDriver> driver(new CudaDriver);
  driver->chunk_bytes_ = align_down(chunk_bytes, kPageBytes);
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
  // No cuInit: before CUDA is initialised this call fails with that, and initialising it here would
  // break a later fork.
  const int code = functions.get_current(&driver->context_);
  if (code != kSuccess && code != kNotInitialized) {
    reason = functions.text(code);
    return nullptr;
  }
  if (code == kNotInitialized || driver->context_ == nullptr) {
    reason = "this thread has no CUDA context; call torch.cuda.init() and use the device first";
    return nullptr;
  }
  return driver;
}

CudaDriver::~CudaDriver() {
  // The library stays loaded: torch uses it too, and unloading a driver is not safe.
}

std::string CudaDriver::register_memory(std::span<std::byte> range) const {
  int code = functions_->push_current(context_);
  if (code != kSuccess) return functions_->text(code);
  std::string failure;
  for (std::uint64_t offset = 0; offset < range.size(); offset += chunk_bytes_) {
    const std::uint64_t nbytes = std::min<std::uint64_t>(chunk_bytes_, range.size() - offset);
    code = functions_->register_host(range.data() + offset, nbytes, kMemHostRegisterPortable);
    if (code == kSuccess) continue;
    failure = join("cuMemHostRegister of ", nbytes, " bytes: ", functions_->text(code));
    functions_->unregister_chunks(range.data(), offset, chunk_bytes_);
    break;
  }
  void* popped = nullptr;
  (void)functions_->pop_current(&popped);
  return failure;
}

void CudaDriver::unregister_memory(std::span<std::byte> range) const noexcept {
  if (functions_->push_current(context_) != kSuccess) return;
  functions_->unregister_chunks(range.data(), range.size(), chunk_bytes_);
  void* popped = nullptr;
  (void)functions_->pop_current(&popped);
}

std::string CudaDriver::try_unregister_memory(std::span<std::byte> range) const {
  int code = functions_->push_current(context_);
  if (code != kSuccess) return functions_->text(code);
  std::uint64_t offset = 0;
  code = functions_->synchronize();
  while (code == kSuccess && offset < range.size()) {
    code = functions_->unregister_host(range.data() + offset);
    if (code == kSuccess) offset += chunk_bytes_;
  }
  void* popped = nullptr;
  (void)functions_->pop_current(&popped);
  if (code == kSuccess) return {};
  std::string failure = join("cuMemHostUnregister: ", functions_->text(code));
  const std::string restoring = register_memory(range.first(offset));
  if (!restoring.empty()) failure += join("; only a part is registered now: ", restoring);
  return failure;
}

}  // namespace memascend

// The devices of the machine, and which of them a thread calls.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <optional>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

/// What a rank works on. The others are there to be touched by mistake: that makes a context, which
/// takes their memory.
inline std::atomic<c10::DeviceIndex> own_device{0};
inline thread_local c10::DeviceIndex current_device = 0;
/// As with CUDA 12: a thread has a context once it has set the device or used it.
inline thread_local bool has_context = false;

inline c10::Device own() { return c10::Device(kSim, own_device); }
void set_own_device(c10::DeviceIndex index);
void set_device(c10::DeviceIndex index);
/// Reports a call on a thread whose current device is another one.
void use_runtime(const char* call);
/// Reports a tensor that is asked for on another device.
void use_device(std::optional<c10::Device> device);

}  // namespace sim

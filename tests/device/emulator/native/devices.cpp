// Devices: which one a thread calls, and contexts where none belongs.
#include "sim.hpp"

namespace sim {

void note_context(c10::DeviceIndex index, const std::string& call) {
  if (index == own_device) return;
  const std::string where = site();
  const std::lock_guard lock(state_mutex);
  find_locked("a context on device " + std::to_string(index) + ", the process works on device " +
              std::to_string(own_device) + ": " + call + " at " + where);
}

void set_own_device(c10::DeviceIndex index) {
  own_device = index;
  set_device(index);
}

void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < kDevices, "sim: no device ", int{index});
  current_device = index;
  has_context = true;
  note_context(index, "set_device");
}

void use_runtime(const char* call) { note_context(current_device, call); }

void use_device(std::optional<c10::Device> device) {
  if (device && device->has_index()) note_context(device->index(), "a tensor on it");
}

}  // namespace sim

// What torch asks of a device: streams, events, the device itself.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "sim.hpp"

namespace sim {

c10::Stream wrapped(std::int64_t id) { return c10::Stream(c10::Stream::UNSAFE, own(), id); }

struct Event {
  MarkerPtr marker;  // of the last recording
};

MarkerPtr marker_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->marker;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kSim; }
  // As torch's for CUDA, which makes no context here: a call does.
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kSim, std::exchange(current_device, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kSim, current_device); }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device) const override { return wrapped(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return wrapped(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return wrapped(new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return wrapped(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return wrapped(std::exchange(current_id, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    use_runtime("stream.query");
    return stream_of(stream.id()).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    use_runtime("stream.synchronize");
    synchronize(stream_of(stream.id()), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    use_runtime("synchronize");
    synchronize_all("device synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    use_runtime("event.record");
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->marker = record_marker(stream_of(stream.id()));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    use_runtime("event.wait");
    const MarkerPtr marker = marker_of(event);
    if (!marker) return;
    Stream& on = stream_of(stream.id());
    const std::lock_guard lock(state_mutex);
    merge(on.clock, marker->clock);
    on.push(Kind::plain, [marker] { marker->wait(); });
  }
  bool queryEvent(void* event) const override {
    use_runtime("event.query");
    const MarkerPtr marker = marker_of(event);
    if (!marker) return true;
    const bool has_passed = marker->query();
    if (has_passed) learn(marker);
    return has_passed;
  }
  void synchronizeEvent(void* event) const override {
    use_runtime("event.synchronize");
    if (const MarkerPtr marker = marker_of(event)) host_wait(marker, "event.synchronize");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return static_cast<double>(marker_of(end)->time - marker_of(begin)->time) / 1e6;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return index == own_device; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  at::Device getDeviceFromPtr(void*) const override { return own(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard lock(state_mutex);
    return is_pinned_locked(data, 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kSim, static_cast<at::HostAllocator*>(pinned_memory()));
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace sim

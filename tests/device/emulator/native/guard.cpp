// What torch asks of a device: streams, events, the device itself.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "sim.hpp"

namespace sim {

c10::Stream wrapped(std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, 0), id);
}

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
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kSim, 0); }
  c10::Device getDevice() const override { return c10::Device(kSim, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

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
    return stream_of(stream.id()).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream_of(stream.id()), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize_all("device synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->marker = record_marker(stream_of(stream.id()));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    const MarkerPtr marker = marker_of(event);
    if (!marker) return;
    Stream& on = stream_of(stream.id());
    const std::lock_guard lock(state_mutex);
    merge(on.clock, marker->clock);
    on.push(Kind::plain, [marker] { marker->wait(); });
  }
  bool queryEvent(void* event) const override {
    const MarkerPtr marker = marker_of(event);
    if (!marker) return true;
    const bool has_passed = marker->query();
    if (has_passed) learn(marker);
    return has_passed;
  }
  void synchronizeEvent(void* event) const override {
    if (const MarkerPtr marker = marker_of(event)) host_wait(marker, "event.synchronize");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return static_cast<double>(marker_of(end)->time - marker_of(begin)->time) / 1e6;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override { has_context = true; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return c10::Device(kSim, 0); }
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

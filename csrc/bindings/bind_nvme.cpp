// Python surface of csrc/nvme/: Store, Ticket, MemoryFaults.
//
// Lock order: no thread waits for a mutex of the store with the GIL held. Calls release the GIL
// before they wait, and the store drops holds (Python objects) after it has unlocked. Under the
// store's mutex_ the GIL is never taken. Under its space_mutex_ it is taken in one case: memory for
// checksums makes an arena grow that registers through Python.
#include <pybind11/stl.h>

#include "base/crc32c.hpp"
#include "bindings/bindings.hpp"
#include "memory/allocator.hpp"
#include "nvme/store.hpp"
#include "nvme/wait_account.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace memascend {
namespace {

using WithoutGil = py::call_guard<py::gil_scoped_release>;

/// A ticket together with the store that can wait for it.
struct StoreTicket {
  std::shared_ptr<Store> store;
  std::shared_ptr<Ticket> ticket;
};

std::byte* as_pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

std::span<std::byte> as_span(std::uintptr_t address, std::size_t nbytes) {
  return {as_pointer(address), nbytes};
}

// A reference to a Python object that threads without the GIL may drop.
std::shared_ptr<void> hold_object(const py::object& object) {
  if (object.is_none()) return nullptr;
  return std::shared_ptr<void>(object.inc_ref().ptr(), [](void* pointer) {
    if (!Py_IsInitialized()) return;  // the interpreter has ended
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(pointer));
  });
}

// Memory of an arena for the store's checksums, under the plan's component name. An arena never
// calls a store, so its lock may be taken under the store's space_mutex_.
Checksums::MemorySource memory_source(std::shared_ptr<Allocator> allocator) {
  if (allocator == nullptr) return {};
  return [allocator = std::move(allocator)](std::uint64_t nbytes) {
    const std::shared_ptr<Block> block = allocator->allocate(nbytes, "checksums", false);
    return std::shared_ptr<std::byte>(block, block->address());
  };
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

// Lets Ctrl-C and other signals reach Python while a device is silent.
void look_for_signals() {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<Store> open_store(
    std::vector<VolumeOptions> volumes, std::string engine, std::size_t queue_depth,
    std::uint64_t chunk_bytes, std::uint64_t grow_bytes, std::uint64_t stripe_bytes,
    double watchdog_seconds, unsigned eio_retries, double eio_pause_seconds, double pace_seconds,
    const std::string& verify, std::shared_ptr<Allocator> checksum_memory,
    std::uintptr_t bounce_address, std::size_t bounce_nbytes, const py::object& bounce_hold,
    std::shared_ptr<MemoryFaults> faults) {
  MA_EXPECT(watchdog_seconds > 0, "watchdog_seconds must be positive, got ", watchdog_seconds);
  MA_EXPECT(eio_pause_seconds >= 0, "eio_pause_seconds must not be negative, got ",
            eio_pause_seconds);
  MA_EXPECT(pace_seconds > 0, "pace_seconds must be positive, got ", pace_seconds);
  StoreOptions options;
  options.volumes = std::move(volumes);
  options.engine = std::move(engine);
  options.engine_options.queue_depth = queue_depth;
  options.engine_options.faults = std::move(faults);
  options.grow_bytes = grow_bytes;
  options.stripe_bytes = stripe_bytes;
  options.verify = parse_verify(verify);
  options.checksum_memory = memory_source(std::move(checksum_memory));
  options.transfer.chunk_bytes = chunk_bytes;
  options.transfer.bounce = as_span(bounce_address, bounce_nbytes);
  options.transfer.watchdog = milliseconds(watchdog_seconds);
  options.transfer.eio_retries = eio_retries;
  options.transfer.eio_pause = milliseconds(eio_pause_seconds);
  options.transfer.pace.window = milliseconds(pace_seconds);
  options.bounce_hold = hold_object(bounce_hold);
  options.while_waiting = &look_for_signals;
  const py::gil_scoped_release release;
  std::shared_ptr<Store> store = Store::open(std::move(options));
  // The last owner waits for I/O, without the GIL.
  return {store.get(), [store](Store*) mutable {
            if (!Py_IsInitialized() || PyGILState_Check() == 0) return store.reset();
            const py::gil_scoped_release without;
            store.reset();
          }};
}

// Calls `start` with the GIL held if no other call is in the store: once released, the GIL comes
// back only when other Python threads release it, milliseconds later.
template <typename Start>
StoreTicket start_transfer(const std::shared_ptr<Store>& store, const Start& start) {
  std::shared_ptr<Ticket> ticket = start(Store::Busy::kReturn);
  if (ticket == nullptr) {
    const py::gil_scoped_release release;
    ticket = start(Store::Busy::kWait);
  }
  return {store, std::move(ticket)};
}

StoreTicket start_write(const std::shared_ptr<Store>& store, const std::string& key,
                        std::uintptr_t address, std::uint64_t nbytes,
                        std::optional<std::uint64_t> offset, std::uint64_t capacity,
                        const py::object& hold) {
  const Store::Memory source{as_pointer(address), capacity, hold_object(hold)};
  if (!offset) {  // may have to wait for space
    const py::gil_scoped_release release;
    return {store, store->write(key, nbytes, source)};
  }
  return start_transfer(
      store, [&](Store::Busy busy) { return store->write(key, nbytes, source, offset, busy); });
}

StoreTicket start_read(const std::shared_ptr<Store>& store, const std::string& key,
                       std::uintptr_t address, std::uint64_t nbytes, std::uint64_t offset,
                       std::uint64_t capacity, const py::object& hold) {
  const Store::Memory target{as_pointer(address), capacity, hold_object(hold)};
  return start_transfer(
      store, [&](Store::Busy busy) { return store->read(key, nbytes, target, offset, busy); });
}

using FaultsClass = py::class_<MemoryFaults, std::shared_ptr<MemoryFaults>>;

// Lets Python read and set a value that may change while an engine runs.
template <typename Value>
void add_live_value(FaultsClass& faults, const char* name,
                    std::atomic<Value> MemoryFaults::* member) {
  faults.def_property(
      name, [member](const MemoryFaults& self) { return (self.*member).load(); },
      [member](MemoryFaults& self, Value value) { self.*member = value; });
}

void bind_faults(py::module_& module) {
  FaultsClass bound(module, "MemoryFaults",
                    "What goes wrong on the memory engine, by a seed. Tests only.");
  bound
      .def(py::init([](std::uint64_t seed, double short_transfer, double eio, double enospc,
                       double again, double reorder, double flip, double lost, double delay,
                       std::uint64_t capacity_bytes) {
             auto faults = std::make_shared<MemoryFaults>();
             faults->seed = seed;
             faults->short_transfer = short_transfer;
             faults->eio = eio;
             faults->enospc = enospc;
             faults->again = again;
             faults->reorder = reorder;
             faults->flip = flip;
             faults->lost = lost;
             faults->delay = delay;
             faults->capacity_bytes = capacity_bytes;
             return faults;
           }),
           py::kw_only(), "seed"_a = 0, "short"_a = 0.0, "eio"_a = 0.0, "enospc"_a = 0.0,
           "again"_a = 0.0, "reorder"_a = 0.0, "flip"_a = 0.0, "lost"_a = 0.0, "delay"_a = 0.0,
           "capacity_bytes"_a = std::uint64_t{1} << 30)
      .def_readonly("seed", &MemoryFaults::seed)
      .def_property_readonly_static(
          "EVERY_VOLUME", [](const py::object& /*cls*/) { return MemoryFaults::kEveryVolume; });
  add_live_value(bound, "paused", &MemoryFaults::paused);
  add_live_value(bound, "paused_volume", &MemoryFaults::paused_volume);
  add_live_value(bound, "gone", &MemoryFaults::gone);
  add_live_value(bound, "slow_volume", &MemoryFaults::slow_volume);
  add_live_value(bound, "slow_milliseconds", &MemoryFaults::slow_milliseconds);
  add_live_value(bound, "slow_width", &MemoryFaults::slow_width);
}

py::dict stats_dict(Store& store) {
  const StoreStats stats = [&] {
    const py::gil_scoped_release release;
    return store.stats();
  }();
  py::dict result = py::cast(stats.counts);
  result["wait_seconds"] = stats.wait_seconds;
  return result;
}

void bind_store(py::module_& module) {
  const StoreOptions defaults;
  py::class_<Store, std::shared_ptr<Store>>(module, "Store",
                                            "Named byte ranges on SSD; see nvme/store.hpp.")
      .def(py::init(&open_store), py::kw_only(), "volumes"_a, "engine"_a = defaults.engine,
           "queue_depth"_a = defaults.engine_options.queue_depth,
           "chunk_bytes"_a = defaults.transfer.chunk_bytes, "grow_bytes"_a = defaults.grow_bytes,
           "stripe_bytes"_a = defaults.stripe_bytes, "watchdog_seconds"_a = 60.0,
           "eio_retries"_a = defaults.transfer.eio_retries, "eio_pause_seconds"_a = 0.1,
           "pace_seconds"_a = 10.0, "verify"_a = "off", "checksum_memory"_a = nullptr,
           "bounce_address"_a, "bounce_nbytes"_a, "bounce_hold"_a, "faults"_a = nullptr)
      .def("reserve", &Store::reserve, py::kw_only(), "key"_a, "nbytes"_a, WithoutGil())
      .def("write", &start_write, py::kw_only(), "key"_a, "address"_a, "nbytes"_a,
           "offset"_a = py::none(), "capacity"_a = 0, "hold"_a = py::none())
      .def("read", &start_read, py::kw_only(), "key"_a, "address"_a, "nbytes"_a, "offset"_a = 0,
           "capacity"_a = 0, "hold"_a = py::none())
      .def("wait_all", &Store::wait_all, WithoutGil())
      .def("discard", &Store::discard, py::kw_only(), "key"_a, WithoutGil())
      .def("shrink", &Store::shrink, WithoutGil())
      .def("exchange", &Store::exchange, py::kw_only(), "key"_a, "other"_a, WithoutGil())
      .def("contains", &Store::contains, py::kw_only(), "key"_a, WithoutGil())
      .def("nbytes", &Store::nbytes, py::kw_only(), "key"_a, WithoutGil())
      .def("keys", &Store::keys, WithoutGil())
      .def("stats", &stats_dict)
      .def("volume_stats", &Store::volume_stats, WithoutGil())
      .def("available_bytes", &Store::available_bytes, WithoutGil())
      .def("provide_checksums", &Store::provide_checksums, py::kw_only(), "nbytes"_a, WithoutGil())
      .def("set_recovery", &Store::set_recovery, "recovery"_a, WithoutGil())
      .def("end_patience", &Store::end_patience)
      .def("close", &Store::close, WithoutGil())
      .def_property_readonly("engine_name", &Store::engine_name)
      .def_property_readonly("engine_reason", &Store::engine_reason)
      .def_property_readonly("engine_description", &Store::engine_description)
      .def_property_readonly("direct", &Store::direct)
      .def_property_readonly("offset_alignment_bytes",
                             [](const Store& store) { return store.alignment().offset_bytes; })
      .def_property_readonly("memory_alignment_bytes",
                             [](const Store& store) { return store.alignment().memory_bytes; });
}

py::dict latency_dict(const Latencies::Summary& latency) {
  return py::dict("count"_a = latency.count, "p50_s"_a = latency.p50, "p99_s"_a = latency.p99,
                  "p999_s"_a = latency.p999, "longest_s"_a = latency.longest);
}

py::dict traffic_dict(const VolumeStats& volume) {
  const LaneTraffic& traffic = volume.traffic;
  return py::dict("bytes_read"_a = traffic.moved.read, "bytes_written"_a = traffic.moved.written,
                  "busy_s"_a = traffic.busy_seconds, "reads"_a = latency_dict(traffic.reads),
                  "writes"_a = latency_dict(traffic.writes),
                  "needed"_a = latency_dict(traffic.needed));
}

void bind_volumes(py::module_& module) {
  py::class_<PrivateDescriptor>(module, "PrivateDescriptor",
                                "A descriptor that forked children do not keep.")
      .def(py::init<int>(), "descriptor"_a)
      .def("close", &PrivateDescriptor::close);
  const VolumeOptions defaults;
  py::class_<VolumeOptions>(module, "VolumeOptions", "A volume of a store; a path alone does, too.")
      .def(py::init<std::string, double, std::uint64_t, int, std::uint64_t>(), "path"_a,
           py::kw_only(), "weight"_a = defaults.weight,
           "capacity_bytes"_a = defaults.capacity_bytes, "descriptor"_a = defaults.descriptor,
           "start_bytes"_a = defaults.start_bytes)
      .def_readonly("path", &VolumeOptions::path)
      .def_readwrite("weight", &VolumeOptions::weight)
      .def_readwrite("cpus", &VolumeOptions::cpus)
      .def_readonly("capacity_bytes", &VolumeOptions::capacity_bytes)
      .def_readonly("descriptor", &VolumeOptions::descriptor)
      .def_readonly("start_bytes", &VolumeOptions::start_bytes);
  py::implicitly_convertible<py::str, VolumeOptions>();
  py::class_<VolumeStats>(module, "VolumeStats", "A volume and what of it is taken.")
      .def_readonly("path", &VolumeStats::path)
      .def_readonly("weight", &VolumeStats::weight)
      .def_readonly("used_bytes", &VolumeStats::used_bytes)
      .def_readonly("copies_on_write", &VolumeStats::copies_on_write)
      .def_property_readonly("traffic", &traffic_dict);
}

void bind_ticket(py::module_& module) {
  py::class_<StoreTicket>(module, "Ticket", "What to wait on for one read or write.")
      .def("wait",
           [](const StoreTicket& ticket) {
             if (ticket.store->ended_well(*ticket.ticket)) return;
             const py::gil_scoped_release release;
             ticket.store->wait(*ticket.ticket);
           })
      .def("done", [](const StoreTicket& ticket) { return ticket.ticket->done(); })
      .def_property_readonly("nbytes",
                             [](const StoreTicket& ticket) { return ticket.ticket->nbytes(); });
}

void bind_crc32c(py::module_& module) {
  py::class_<Crc32cMethod>(module, "Crc32cMethod", "A way to compute CRC-32C; base/crc32c.hpp.")
      .def_readonly("name", &Crc32cMethod::name)
      .def(
          "checksum",
          [](const Crc32cMethod& method, std::uintptr_t address, std::size_t nbytes,
             std::uint32_t previous) {
            return crc32c_by(method, as_span(address, nbytes), previous);
          },
          py::kw_only(), "address"_a, "nbytes"_a, "previous"_a = 0, WithoutGil());
  module.def("crc32c_methods", &crc32c_methods, "Those of this processor, slowest first.");
}

}  // namespace

void bind_nvme(py::module_& module) {
  module.def("largest_file_bytes", &largest_file_bytes, py::kw_only(), "descriptor"_a);
  module.def("describe_cause", &describe_cause, py::kw_only(), "code"_a);
  module.def("wait_behind", [] { waits_behind = true; });
  bind_faults(module);
  bind_ticket(module);
  bind_volumes(module);
  bind_store(module);
  bind_crc32c(module);
}

}  // namespace memascend

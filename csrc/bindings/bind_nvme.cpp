// Python surface of csrc/nvme/: Store, Ticket, MemoryFaults.
//
// Lock order: the interpreter's lock is never taken under the store's mutex. Calls give the former
// up before they enter the store, and the store drops holds (Python objects) after it has left its
// own.
#include <pybind11/stl.h>

#include "base/crc32c.hpp"
#include "bindings/bindings.hpp"
#include "memory/allocator.hpp"
#include "nvme/store.hpp"

namespace py = pybind11;

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

// A share in a Python object for threads that do not hold the interpreter's lock.
std::shared_ptr<void> hold_object(const py::object& object) {
  if (object.is_none()) return nullptr;
  return std::shared_ptr<void>(object.inc_ref().ptr(), [](void* pointer) {
    if (!Py_IsInitialized()) return;  // the interpreter has ended: nobody is left to tell
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(pointer));
  });
}

// Memory of an arena for the store's checksums, under the name that the plan gives it. An arena
// never calls a store, so its lock may be taken under the store's.
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

std::shared_ptr<Store> open_store(
    std::vector<VolumeOptions> volumes, std::string engine, std::size_t queue_depth,
    std::uint64_t chunk_bytes, std::size_t threads, bool sqpoll, bool iopoll,
    std::uint64_t grow_bytes, std::uint64_t stripe_bytes, double watchdog_seconds,
    unsigned eio_retries, double eio_pause_seconds, double pace_seconds, const std::string& verify,
    std::shared_ptr<Allocator> checksum_memory, std::uintptr_t bounce_address,
    std::size_t bounce_nbytes, const py::object& bounce_hold,
    std::shared_ptr<MemoryFaults> faults) {
  MA_EXPECT(watchdog_seconds > 0, "watchdog_seconds must be positive, got ", watchdog_seconds);
  MA_EXPECT(eio_pause_seconds >= 0, "eio_pause_seconds must not be negative, got ",
            eio_pause_seconds);
  MA_EXPECT(pace_seconds > 0, "pace_seconds must be positive, got ", pace_seconds);
  StoreOptions options;
  options.volumes = std::move(volumes);
  options.engine = std::move(engine);
  options.engine_options = {queue_depth, threads, sqpoll, iopoll, std::move(faults)};
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
  const py::gil_scoped_release release;
  return Store::open(std::move(options));
}

StoreTicket start_write(const std::shared_ptr<Store>& store, const std::string& key,
                        std::uintptr_t address, std::uint64_t nbytes,
                        std::optional<std::uint64_t> offset, std::uint64_t capacity,
                        const py::object& hold) {
  Store::Memory source{as_pointer(address), capacity, hold_object(hold)};
  const py::gil_scoped_release release;
  return {store, store->write(key, nbytes, std::move(source), offset)};
}

StoreTicket start_read(const std::shared_ptr<Store>& store, const std::string& key,
                       std::uintptr_t address, std::uint64_t nbytes, std::uint64_t offset,
                       std::uint64_t capacity, const py::object& hold) {
  Store::Memory target{as_pointer(address), capacity, hold_object(hold)};
  const py::gil_scoped_release release;
  return {store, store->read(key, nbytes, std::move(target), offset)};
}

// Raises the class of memascend.errors called `name`, an OSError with more attributes.
void raise_store_error(const char* name, const char* message, const ErrorPlace& place) {
  const py::object type = py::module_::import("memascend.errors").attr(name);
  const py::object error = type(place.code, message);
  error.attr("key") = place.key;
  error.attr("volume") = place.volume;
  error.attr("offset") = place.offset;
  error.attr("nbytes") = place.nbytes;
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const StoreFullError& error) {
    raise_store_error("StoreFullError", error.what(), error.place());
  } catch (const CorruptionError& error) {
    raise_store_error("CorruptionError", error.what(), error.place());
  } catch (const StoreError& error) {
    raise_store_error("StoreError", error.what(), error.place());
  } catch (const EngineUnavailableError& error) {
    const py::object type = py::module_::import("memascend.errors").attr("EngineUnavailableError");
    PyErr_SetObject(type.ptr(), type(error.code(), error.what()).ptr());
  }
}

void bind_faults(py::module_& module) {
  py::class_<MemoryFaults, std::shared_ptr<MemoryFaults>>(
      module, "MemoryFaults", "What goes wrong on the memory engine, by a seed. Tests only.")
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
           py::kw_only(), py::arg("seed") = 0, py::arg("short") = 0.0, py::arg("eio") = 0.0,
           py::arg("enospc") = 0.0, py::arg("again") = 0.0, py::arg("reorder") = 0.0,
           py::arg("flip") = 0.0, py::arg("lost") = 0.0, py::arg("delay") = 0.0,
           py::arg("capacity_bytes") = std::uint64_t{1} << 30)
      .def_readonly("seed", &MemoryFaults::seed)
      .def_property(
          "paused", [](const MemoryFaults& faults) { return faults.paused.load(); },
          [](MemoryFaults& faults, bool paused) { faults.paused = paused; })
      .def_property(
          "paused_volume", [](const MemoryFaults& faults) { return faults.paused_volume.load(); },
          [](MemoryFaults& faults, int index) { faults.paused_volume = index; })
      .def_property(
          "gone", [](const MemoryFaults& faults) { return faults.gone.load(); },
          [](MemoryFaults& faults, int code) { faults.gone = code; })
      .def_property(
          "slow_volume", [](const MemoryFaults& faults) { return faults.slow_volume.load(); },
          [](MemoryFaults& faults, int index) { faults.slow_volume = index; })
      .def_property(
          "slow_milliseconds",
          [](const MemoryFaults& faults) { return faults.slow_milliseconds.load(); },
          [](MemoryFaults& faults, int value) { faults.slow_milliseconds = value; });
}

py::dict stats_dict(Store& store) {
  const StoreStats stats = [&] {
    const py::gil_scoped_release release;
    return store.stats();
  }();
  py::dict result;
  result["bytes_read"] = stats.bytes_read;
  result["bytes_written"] = stats.bytes_written;
  result["bytes_bounced"] = stats.bytes_bounced;
  result["requests"] = stats.requests;
  result["resubmitted"] = stats.resubmitted;
  result["retries"] = stats.retries;
  result["eio_retries"] = stats.eio_retries;
  result["stalls"] = stats.stalls;
  result["slow_spells"] = stats.slow_spells;
  result["bytes_verified"] = stats.bytes_verified;
  result["bytes_read_back"] = stats.bytes_read_back;
  result["mismatches"] = stats.mismatches;
  result["corruptions"] = stats.corruptions;
  result["checksum_bytes"] = stats.checksum_bytes;
  result["reserved_bytes"] = stats.reserved_bytes;
  result["used_bytes"] = stats.used_bytes;
  result["available_bytes"] = stats.available_bytes;
  result["key_count"] = stats.key_count;
  result["in_flight_count"] = stats.in_flight_count;
  result["wait_seconds"] = stats.wait_seconds;
  return result;
}

// Waits in slices, so that Ctrl-C and other signals reach Python while a device does not answer.
template <typename WaitFor>
void wait_in_slices(WaitFor is_over_within) {
  constexpr std::chrono::milliseconds kSlice{200};
  for (;;) {
    {
      const py::gil_scoped_release release;
      if (is_over_within(kSlice)) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void close(Store& store) {
  try {
    wait_in_slices([&](auto slice) { return store.close_within(slice); });
  } catch (const py::error_already_set&) {
    store.abandon();  // the user does not want to wait, and would wait again in the destructor
    throw;
  }
}

void bind_store(py::module_& module) {
  const StoreOptions defaults;
  py::class_<Store, std::shared_ptr<Store>>(module, "Store",
                                            "Named byte ranges on SSD; see nvme/store.hpp.")
      .def(py::init(&open_store), py::kw_only(), py::arg("volumes"),
           py::arg("engine") = defaults.engine,
           py::arg("queue_depth") = defaults.engine_options.queue_depth,
           py::arg("chunk_bytes") = defaults.transfer.chunk_bytes,
           py::arg("threads") = defaults.engine_options.thread_count, py::arg("sqpoll") = false,
           py::arg("iopoll") = false, py::arg("grow_bytes") = defaults.grow_bytes,
           py::arg("stripe_bytes") = defaults.stripe_bytes, py::arg("watchdog_seconds") = 60.0,
           py::arg("eio_retries") = defaults.transfer.eio_retries,
           py::arg("eio_pause_seconds") = 0.1, py::arg("pace_seconds") = 10.0,
           py::arg("verify") = "off", py::arg("checksum_memory") = nullptr,
           py::arg("bounce_address"), py::arg("bounce_nbytes"), py::arg("bounce_hold"),
           py::arg("faults") = nullptr)
      .def("reserve", &Store::reserve, py::kw_only(), py::arg("key"), py::arg("nbytes"),
           WithoutGil())
      .def("write", &start_write, py::kw_only(), py::arg("key"), py::arg("address"),
           py::arg("nbytes"), py::arg("offset") = py::none(), py::arg("capacity") = 0,
           py::arg("hold") = py::none())
      .def("read", &start_read, py::kw_only(), py::arg("key"), py::arg("address"),
           py::arg("nbytes"), py::arg("offset") = 0, py::arg("capacity") = 0,
           py::arg("hold") = py::none())
      .def("wait_all",
           [](Store& store) {
             wait_in_slices([&](auto slice) { return store.wait_all_for(slice); });
           })
      .def("discard", &Store::discard, py::kw_only(), py::arg("key"), WithoutGil())
      .def("contains", &Store::contains, py::kw_only(), py::arg("key"), WithoutGil())
      .def("nbytes", &Store::nbytes, py::kw_only(), py::arg("key"), WithoutGil())
      .def("keys", &Store::keys, WithoutGil())
      .def("stats", &stats_dict)
      .def("volume_stats", &Store::volume_stats, WithoutGil())
      .def("provide_checksums", &Store::provide_checksums, py::kw_only(), py::arg("nbytes"),
           WithoutGil())
      .def("set_recovery", &Store::set_recovery, py::arg("recovery"), WithoutGil())
      .def("close", &close)
      .def_property_readonly("engine_name", &Store::engine_name)
      .def_property_readonly("engine_reason", &Store::engine_reason)
      .def_property_readonly("engine_description", &Store::engine_description)
      .def_property_readonly("direct", &Store::direct)
      .def_property_readonly("offset_alignment_bytes",
                             [](const Store& store) { return store.alignment().offset_bytes; })
      .def_property_readonly("memory_alignment_bytes",
                             [](const Store& store) { return store.alignment().memory_bytes; });
}

void bind_volumes(py::module_& module) {
  const VolumeOptions defaults;
  py::class_<VolumeOptions>(module, "VolumeOptions", "A volume of a store; a path alone does, too.")
      .def(py::init<std::string, double, std::uint64_t, int, std::uint64_t>(), py::arg("path"),
           py::kw_only(), py::arg("weight") = defaults.weight,
           py::arg("capacity_bytes") = defaults.capacity_bytes,
           py::arg("descriptor") = defaults.descriptor,
           py::arg("start_bytes") = defaults.start_bytes)
      .def_readonly("path", &VolumeOptions::path)
      .def_readonly("weight", &VolumeOptions::weight)
      .def_readonly("capacity_bytes", &VolumeOptions::capacity_bytes)
      .def_readonly("descriptor", &VolumeOptions::descriptor)
      .def_readonly("start_bytes", &VolumeOptions::start_bytes);
  py::implicitly_convertible<py::str, VolumeOptions>();
  py::class_<VolumeStats>(module, "VolumeStats", "A volume and what of it is taken.")
      .def_readonly("path", &VolumeStats::path)
      .def_readonly("weight", &VolumeStats::weight)
      .def_readonly("used_bytes", &VolumeStats::used_bytes)
      .def_readonly("available_bytes", &VolumeStats::available_bytes);
}

void bind_ticket(py::module_& module) {
  py::class_<StoreTicket>(module, "Ticket", "What to wait on for one read or write.")
      .def("wait",
           [](const StoreTicket& ticket) {
             wait_in_slices(
                 [&](auto slice) { return ticket.store->wait_for(*ticket.ticket, slice); });
           })
      .def("done", [](const StoreTicket& ticket) { return ticket.ticket->done(); })
      .def_property_readonly("nbytes",
                             [](const StoreTicket& ticket) { return ticket.ticket->nbytes(); });
}

void bind_crc32c(py::module_& module) {
  module.def(
      "crc32c",
      [](std::uintptr_t address, std::size_t nbytes, std::uint32_t previous, bool portable) {
        const std::span<const std::byte> bytes = as_span(address, nbytes);
        return portable ? crc32c_portable(bytes, previous) : crc32c(bytes, previous);
      },
      "CRC-32C of memory; see base/crc32c.hpp.", py::kw_only(), py::arg("address"),
      py::arg("nbytes"), py::arg("previous") = 0, py::arg("portable") = false, WithoutGil());
  module.def("crc32c_method", &crc32c_method, "How this processor computes it.");
}

}  // namespace

void bind_nvme(py::module_& module) {
  py::register_exception_translator(&translate);
  module.def("describe_cause", &describe_cause, py::kw_only(), py::arg("code"));
  bind_faults(module);
  bind_ticket(module);
  bind_volumes(module);
  bind_store(module);
  bind_crc32c(module);
}

}  // namespace memascend

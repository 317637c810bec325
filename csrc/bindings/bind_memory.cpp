// Python surface of csrc/memory/.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/free_space.hpp"
#include "bindings/bindings.hpp"
#include "memory/allocator.hpp"
#include "system/owner_process.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace memascend {
namespace {

using WithoutGil = py::call_guard<py::gil_scoped_release>;

HugePages parse_huge_pages(const std::string& name) {
  if (name == "auto") return HugePages::kAuto;
  if (name == "explicit") return HugePages::kExplicit;
  if (name == "transparent") return HugePages::kTransparent;
  MA_EXPECT(name == "off", "huge_pages must be auto, explicit, transparent or off, got '", name,
            "'");
  return HugePages::kOff;
}

std::uintptr_t as_number(const std::byte* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

/// A registrar in Python. Called under the allocator's lock, by threads that do not hold the GIL.
/// No thread waits for that lock with the GIL held (Allocator::free).
class PythonRegistrar : public HostRegistrar {
 public:
  explicit PythonRegistrar(py::object target) : target_(std::move(target)) {}
  ~PythonRegistrar() override {
    if (!Py_IsInitialized()) {  // the interpreter has ended
      target_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    target_ = py::object();
  }
  PythonRegistrar(const PythonRegistrar&) = delete;
  PythonRegistrar& operator=(const PythonRegistrar&) = delete;

  std::string register_memory(std::span<std::byte> range) override {
    return call("register", range);
  }
  void unregister_memory(std::span<std::byte> range) noexcept override {
    if (!Py_IsInitialized() || !owner_.is_current()) return;
    if (!call("unregister_when_idle", range).empty()) (void)call("unregister", range);
  }
  std::string try_unregister_memory(std::span<std::byte> range) override {
    return call("unregister_when_idle", range);
  }

 private:
  std::string call(const char* name, std::span<std::byte> range) {
    const py::gil_scoped_acquire gil;
    try {
      return py::str(target_.attr(name)(as_number(range.data()), range.size()));
    } catch (const py::error_already_set& error) {
      // A signal interrupted this call by chance; pass it on to the thread that waits.
      if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
      return error.what();
    }
  }

  py::object target_;
  const OwnerProcess owner_;
};

std::shared_ptr<Allocator> make_allocator(const std::string& huge_pages, bool lock,
                                          bool register_device, int numa_node,
                                          std::uint64_t limit_bytes, const py::object& registrar,
                                          const std::string& cuda_library) {
  AllocatorOptions options;
  options.arena.pages.huge_pages = parse_huge_pages(huge_pages);
  options.arena.pages.lock = lock;
  options.arena.pages.numa_node = numa_node;
  options.arena.register_device = register_device;
  if (!registrar.is_none()) options.arena.registrar = std::make_shared<PythonRegistrar>(registrar);
  options.arena.cuda_library = cuda_library;
  options.limit_bytes = limit_bytes;
  return Allocator::create(options);
}

/// A writable range of bytes; the exporting object lives as long as the view.
py::buffer_info view_bytes(std::byte* address, std::uint64_t nbytes) {
  const auto length = static_cast<py::ssize_t>(nbytes);
  return py::buffer_info(reinterpret_cast<std::uint8_t*>(address), length);
}

void bind_structs(py::module_& module) {
  py::class_<ArenaReport>(module, "ArenaReport")
      .def_readonly("reserved_bytes", &ArenaReport::reserved_bytes)
      .def_readonly("resident_bytes", &ArenaReport::resident_bytes)
      .def_readonly("huge_page_bytes", &ArenaReport::huge_page_bytes)
      .def_readonly("locked_bytes", &ArenaReport::locked_bytes)
      .def_readonly("registered_bytes", &ArenaReport::registered_bytes)
      .def_readonly("wants_registration", &ArenaReport::wants_registration)
      .def_readonly("numa_node", &ArenaReport::numa_node)
      .def_readonly("notes", &ArenaReport::notes);
  py::class_<AllocatorStats>(module, "AllocatorStats")
      .def_readonly("requested_bytes", &AllocatorStats::requested_bytes)
      .def_readonly("used_bytes", &AllocatorStats::used_bytes)
      .def_readonly("reserved_bytes", &AllocatorStats::reserved_bytes)
      .def_readonly("registered_bytes", &AllocatorStats::registered_bytes)
      .def_readonly("peak_used_bytes", &AllocatorStats::peak_used_bytes)
      .def_readonly("peak_reserved_bytes", &AllocatorStats::peak_reserved_bytes)
      .def_readonly("block_count", &AllocatorStats::block_count);
  py::class_<ComponentStats>(module, "ComponentStats")
      .def_readonly("live_bytes", &ComponentStats::live_bytes)
      .def_readonly("peak_bytes", &ComponentStats::peak_bytes)
      .def_readonly("block_count", &ComponentStats::block_count);
}

void bind_allocator(py::module_& module) {
  py::class_<Block>(module, "Block", py::buffer_protocol())
      .def_buffer([](Block& block) { return view_bytes(block.address(), block.nbytes()); })
      .def_property_readonly("address",
                             [](const Block& block) { return as_number(block.address()); })
      .def_property_readonly("nbytes", &Block::nbytes)
      .def_property_readonly("capacity_bytes", &Block::capacity_bytes)
      .def_property_readonly("component", &Block::component);
  py::class_<Allocator, std::shared_ptr<Allocator>>(module, "Allocator")
      .def(py::init(&make_allocator), py::kw_only(), "huge_pages"_a, "lock"_a, "register_device"_a,
           "numa_node"_a = -1, "limit_bytes"_a = 0, "registrar"_a = py::none(),
           "cuda_library"_a = ArenaOptions{}.cuda_library)
      .def("allocate", &Allocator::allocate, py::kw_only(), "nbytes"_a, "component"_a,
           "zero"_a = false, WithoutGil())
      .def("trim", &Allocator::trim, WithoutGil())
      .def("report", &Allocator::report, WithoutGil())
      .def("notes", &Allocator::notes, WithoutGil())
      .def("stats", &Allocator::stats, WithoutGil())
      .def("components", &Allocator::components, WithoutGil())
      .def("contains", &Allocator::contains, "address"_a, WithoutGil())
      .def("is_valid", &Allocator::is_valid, WithoutGil());
}

using Run = std::optional<std::pair<std::uint64_t, std::uint64_t>>;

/// Returns a free run. `besides` is a taken one that counts as free, or null.
template <typename Find>
Run find_run(FreeSpace& space, const TakenRun* besides, Find find) {
  if (besides != nullptr) {
    MA_EXPECT(besides->is_of(space), "the run was released, or is of another space");
    space.give(besides->offset(), besides->nbytes());
  }
  const std::optional<FreeRun> run = find();
  if (besides != nullptr) space.take(besides->offset(), besides->nbytes());
  return run ? Run({run->offset, run->nbytes}) : std::nullopt;
}

/// Free runs of a tensor's memory. The GIL is their lock: no call lets it go.
void bind_free_space(py::module_& module) {
  py::class_<TakenRun>(module, "TakenRun")
      .def_property_readonly("begin", &TakenRun::offset)
      .def_property_readonly("nbytes", &TakenRun::nbytes)
      .def("release", &TakenRun::release);
  py::class_<FreeSpace, std::shared_ptr<FreeSpace>>(module, "FreeSpace")
      .def(py::init([](std::uint64_t nbytes) {
             MA_EXPECT(nbytes > 0, "nbytes must be positive, got ", nbytes);
             auto space = std::make_shared<FreeSpace>(nbytes);
             space->mark(0, nbytes, true);
             return space;
           }),
           "nbytes"_a)
      .def_property_readonly("free_bytes", &FreeSpace::free_bytes)
      .def(
          "best",
          [](FreeSpace& space, std::uint64_t nbytes, const TakenRun* besides) {
            return find_run(space, besides, [&] { return space.best_backed(nbytes); });
          },
          "nbytes"_a, py::kw_only(), "besides"_a = py::none())
      .def(
          "largest",
          [](FreeSpace& space, const TakenRun* besides) {
            return find_run(space, besides, [&] { return space.largest_backed(); });
          },
          py::kw_only(), "besides"_a = py::none())
      .def(
          "take",
          [](const std::shared_ptr<FreeSpace>& space, std::uint64_t begin, std::uint64_t nbytes) {
            MA_EXPECT(nbytes > 0, "nbytes must be positive, got ", nbytes);
            const auto free = space->pieces(begin, begin + nbytes, true);
            MA_EXPECT(free.size() == 1 && free.front().nbytes == nbytes, "bytes ", begin, " to ",
                      begin + nbytes, " are not all free");
            return std::make_unique<TakenRun>(space, begin, nbytes);
          },
          py::kw_only(), "begin"_a, "nbytes"_a);
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_structs(module);
  bind_allocator(module);
  bind_free_space(module);
}

}  // namespace memascend

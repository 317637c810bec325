// The extension module `memascend._core`: registers all errors, then each feature. See _core.pyi.
#include "base/check.hpp"
#include "bindings/bindings.hpp"
#include "nvme/engine/errors.hpp"
#include "system/pages.hpp"

namespace py = pybind11;

namespace memascend {
namespace {

// Returns a class of memascend.errors by name.
py::object error_class(const char* name) {
  return py::module_::import("memascend.errors").attr(name);
}

void raise(const py::object& type, const py::object& error) {
  PyErr_SetObject(type.ptr(), error.ptr());
}

// Raises an OSError subclass with additional attributes.
void raise_store_error(const char* name, const StoreError& raised) {
  const ErrorPlace& place = raised.place();
  const py::object type = error_class(name);
  const py::object error = type(place.code, raised.what());
  error.attr("key") = place.key;
  error.attr("volume") = place.volume;
  error.attr("offset") = place.offset;
  error.attr("nbytes") = place.nbytes;
  raise(type, error);
}

void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const HostMemoryError& raised) {
    const py::object type = error_class("HostMemoryError");
    const py::object error = type(raised.what());
    error.attr("requested_bytes") = raised.requested_bytes;
    error.attr("reserved_bytes") = raised.reserved_bytes;
    error.attr("limit_bytes") = raised.limit_bytes;
    raise(type, error);
  } catch (const StoreFullError& raised) {
    raise_store_error("StoreFullError", raised);
  } catch (const CorruptionError& raised) {
    raise_store_error("CorruptionError", raised);
  } catch (const StoreError& raised) {
    raise_store_error("StoreError", raised);
  } catch (const EngineUnavailableError& raised) {
    const py::object type = error_class("EngineUnavailableError");
    raise(type, type(raised.code(), raised.what()));
  } catch (const SystemCallError& raised) {
    // OSError(errno, text) selects FileNotFoundError, PermissionError, ... by itself.
    PyErr_SetObject(PyExc_OSError, py::make_tuple(raised.code(), raised.what()).ptr());
  }
}

}  // namespace
}  // namespace memascend

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native core of memascend: memory, nvme, kernels. See _core.pyi.";
  py::register_exception_translator(&memascend::translate);
  memascend::bind_memory(module);
  memascend::bind_nvme(module);
  memascend::bind_kernels(module);
}

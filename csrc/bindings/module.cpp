// The extension module `memascend._core`: registers the shared errors, then each feature.
#include <pybind11/pybind11.h>

#include "base/check.hpp"
#include "bindings/bindings.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native core of memascend: memory, nvme, kernels. See _core.pyi.";
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const memascend::SystemCallError& error) {
      // OSError(errno, text) picks FileNotFoundError, PermissionError, ... by itself.
      const py::object arguments = py::make_tuple(error.code(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  memascend::bind_memory(module);
  memascend::bind_nvme(module);
  memascend::bind_kernels(module);
}

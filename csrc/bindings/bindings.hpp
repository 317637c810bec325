// One bind function per feature; module.cpp calls them in layer order.
//
// Addresses, byte counts, enums and plain structs cross this line, never a torch type. Every
// argument is named, every waiting call releases the GIL, and the bindings contain no policy.
#pragma once

#include <pybind11/pybind11.h>

namespace memascend {

void bind_memory(pybind11::module_& module);
void bind_nvme(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);

}  // namespace memascend

// Python surface of csrc/kernels/.
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "bindings/bindings.hpp"
#include "kernels/overflow.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace memascend {
namespace {

overflow::ScanResult overflow_scan(std::uintptr_t address, std::size_t numel,
                                   const std::string& dtype, bool sum_squares, std::size_t threads,
                                   const std::string& isa) {
  const overflow::Format format = overflow::parse_format(dtype);
  const overflow::Isa chosen = overflow::parse_isa(isa);
  const py::gil_scoped_release release;
  return overflow::scan(reinterpret_cast<const void*>(address), numel, format, chosen,
                        {.sum_squares = sum_squares, .threads = threads});
}

std::vector<std::string> overflow_isas() {
  std::vector<std::string> names;
  for (const overflow::Isa isa : overflow::available_isas())
    names.emplace_back(overflow::name(isa));
  return names;
}

}  // namespace

void bind_kernels(py::module_& module) {
  using overflow::ScanResult;
  py::class_<ScanResult>(module, "ScanResult")
      .def(py::init<bool, double>(), py::kw_only(), "non_finite"_a, "sum_squares"_a)
      .def_readonly("non_finite", &ScanResult::non_finite)
      .def_readonly("sum_squares", &ScanResult::sum_squares)
      .def("__repr__", [](const ScanResult& self) {
        return py::str("ScanResult(non_finite={}, sum_squares={})")
            .format(self.non_finite, self.sum_squares);
      });
  module.def("overflow_scan", &overflow_scan, py::kw_only(), "address"_a, "numel"_a, "dtype"_a,
             "sum_squares"_a = false, "threads"_a = 0, "isa"_a = "auto");
  module.def("overflow_isas", &overflow_isas);
}

}  // namespace memascend

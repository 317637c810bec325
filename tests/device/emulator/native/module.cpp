// The Python module. One translation unit: torch's headers take twenty seconds each time.
// clang-format off
#include "sim.hpp"
#include "reports.cpp"
#include "devices.cpp"
#include "streams.cpp"
#include "detectors.cpp"
#include "device_memory.cpp"
#include "host_memory.cpp"
#include "copies.cpp"
#include "tensors.cpp"
#include "operators.cpp"
#include "collectives.cpp"
#include "guard.cpp"
// clang-format on

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using released = py::call_guard<py::gil_scoped_release>;
  m.def("set_delays", &sim::set_delays, py::arg("seed"), py::arg("copy_us"), py::arg("kernel_us"),
        "Random delays before copies and kernels, at most so many microseconds.");
  m.def("set_pinned_copies_block", [](bool block) { sim::pinned_copies_block = block; });
  m.def(
      "set_poisons_and_sums", [](bool on) { sim::poisons_and_sums = on; },
      "Whether mistakes are looked for where that takes time; where time is measured, not.");
  m.def("sleep", &sim::sleep_on_stream, py::arg("seconds"));
  m.def("set_launches_block", [](bool block) { sim::launches_block = block; });
  m.def("site", &sim::site);
  m.def("take_waits", &sim::take_waits);
  m.def("take_findings", &sim::take_findings);
  m.def("use_on_host", &sim::use_on_host, py::arg("address"), py::arg("nbytes"),
        py::arg("is_write"), py::arg("what"));
  m.def("memory", &sim::memory_stats);
  m.def(
      "take_host_peak", &sim::take_host_peak,
      "The most host memory since the last call, in bytes. The first call counts from the start.");
  m.def("set_limit", &sim::set_limit, "Most bytes of device memory; 0: no limit.");
  m.def("share_free_blocks", &sim::share_free_blocks);
  m.def("reset_peak", &sim::reset_peak);
  m.def("register_host", [](std::uintptr_t address, std::size_t nbytes) {
    return sim::register_host(reinterpret_cast<void*>(address), nbytes);
  });
  m.def("unregister_host", [](std::uintptr_t address) {
    return sim::unregister_host(reinterpret_cast<void*>(address));
  });
  m.def(
      "synchronize",
      [] {
        sim::use_runtime("synchronize");
        sim::synchronize_all("device synchronize");
      },
      released());
  m.def("collective", &sim::collective, py::arg("kind"), py::arg("gloo"), py::arg("outs"),
        py::arg("ins"), py::arg("root"), py::arg("op"), released());
  m.def("set_own_device", [](int index) { sim::set_own_device(index); });
  m.def("own_device", [] { return int{sim::own_device}; });
  m.def("set_device", [](int index) { sim::set_device(index); });
  m.def("current_device", [] { return int{sim::current_device}; });
  m.def("current_stream", [] { return sim::current_id; });
  m.def(
      "set_stream",
      [](std::int64_t id) {
        sim::current_id = id;
        sim::current_device = sim::own_device;
      },
      "Makes the stream current, and its device.");
}

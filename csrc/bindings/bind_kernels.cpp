// Python surface of csrc/kernels/.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "kernels/adam.hpp"
#include "kernels/codes.hpp"
#include "kernels/halves.hpp"
#include "kernels/overflow.hpp"
#include "kernels/remainders.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace memascend {
namespace {

overflow::ScanResult overflow_scan(std::uintptr_t address, std::size_t numel,
                                   const std::string& dtype, bool sum_squares, std::size_t threads,
                                   kernels::Helpers* helpers, const std::string& isa) {
  const overflow::Format format = kernels::parse_format(dtype);
  const overflow::Isa chosen = kernels::parse_isa(isa);
  const py::gil_scoped_release release;
  return overflow::scan(reinterpret_cast<const void*>(address), numel, format, chosen,
                        {.sum_squares = sum_squares, .threads = threads, .helpers = helpers});
}

adam::Weights parse_weights(const std::string& dtype) {
  if (dtype == "float32") return adam::Weights::kWhole;
  if (dtype == "int16") return adam::Weights::kHalves;
  if (dtype == "int8") return adam::Weights::kRemainders;
  throw std::invalid_argument("no weights of dtype \"" + dtype + "\"; known: float32, int16, int8");
}

adam::Moments parse_moments(const std::string& dtype) {
  if (dtype == "float32") return adam::Moments::kFloat32;
  if (dtype == "bfloat16") return adam::Moments::kBfloat16;
  if (dtype == "int8") return adam::Moments::kCodes;
  if (dtype == "int8/bfloat16") return adam::Moments::kFirstInCodes;
  throw std::invalid_argument("no moments of dtype \"" + dtype +
                              "\"; known: float32, bfloat16, int8, int8/bfloat16");
}

void adam_update(std::uintptr_t gradient, const std::string& gradient_dtype, std::uintptr_t weight,
                 std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t output,
                 const std::optional<std::string>& output_dtype, const std::string& weight_dtype,
                 const std::string& moment_dtype, std::uintptr_t scales, std::size_t numel,
                 const adam::Coefficients& coefficients, std::size_t tail_numel,
                 std::uint64_t rounding_key, std::uint64_t first_index, std::size_t threads,
                 kernels::Helpers* helpers, const std::string& isa) {
  adam::Operands operands{
      .gradient = reinterpret_cast<const void*>(gradient),
      .gradient_format = kernels::parse_format(gradient_dtype),
      .weight = reinterpret_cast<void*>(weight),
      .weights = parse_weights(weight_dtype),
      .exp_avg = reinterpret_cast<void*>(exp_avg),
      .exp_avg_sq = reinterpret_cast<void*>(exp_avg_sq),
      .moments = parse_moments(moment_dtype),
      .scales = reinterpret_cast<float*>(scales),
      .output = reinterpret_cast<void*>(output),
      .output_format = {},
      .numel = numel,
  };
  if (output_dtype) operands.output_format = kernels::parse_format(*output_dtype);
  const kernels::Isa chosen = kernels::parse_isa(isa);
  const py::gil_scoped_release release;
  adam::update(operands, coefficients, chosen,
               {.tail_numel = tail_numel,
                .threads = threads,
                .helpers = helpers,
                .rounding = {.key = rounding_key, .first_index = first_index}});
}

void halves_join(std::uintptr_t rounded, std::uintptr_t low, std::uintptr_t flags,
                 const std::string& flag_dtype, std::uintptr_t weights, std::size_t numel) {
  const kernels::Format format = kernels::parse_format(flag_dtype);
  const py::gil_scoped_release release;
  halves::join(reinterpret_cast<const std::uint16_t*>(rounded),
               reinterpret_cast<const std::uint16_t*>(low), reinterpret_cast<const void*>(flags),
               format, reinterpret_cast<std::uint32_t*>(weights), numel);
}

void halves_cut(std::uintptr_t weights, std::uintptr_t high, std::uintptr_t low,
                std::size_t numel) {
  const py::gil_scoped_release release;
  halves::cut(reinterpret_cast<const std::uint32_t*>(weights),
              reinterpret_cast<std::uint16_t*>(high), reinterpret_cast<std::uint16_t*>(low), numel);
}

void halves_round_high(std::uintptr_t high, std::uintptr_t low, std::uintptr_t flags,
                       const std::string& flag_dtype, std::size_t numel) {
  const kernels::Format format = kernels::parse_format(flag_dtype);
  const py::gil_scoped_release release;
  halves::round_high(reinterpret_cast<std::uint16_t*>(high),
                     reinterpret_cast<const std::uint16_t*>(low), reinterpret_cast<void*>(flags),
                     format, numel);
}

void halves_clear_flags(std::uintptr_t flags, const std::string& flag_dtype, std::size_t numel) {
  const kernels::Format format = kernels::parse_format(flag_dtype);
  const py::gil_scoped_release release;
  halves::clear_flags(reinterpret_cast<void*>(flags), format, numel);
}

void halves_join_without_flags(std::uintptr_t rounded, std::uintptr_t low, std::uintptr_t weights,
                               std::size_t numel) {
  const py::gil_scoped_release release;
  halves::join_without_flags(reinterpret_cast<const std::uint16_t*>(rounded),
                             reinterpret_cast<const std::uint16_t*>(low),
                             reinterpret_cast<std::uint32_t*>(weights), numel);
}

void halves_round_high_without_flags(std::uintptr_t high, std::uintptr_t low, std::size_t numel) {
  const py::gil_scoped_release release;
  halves::round_high_without_flags(reinterpret_cast<std::uint16_t*>(high),
                                   reinterpret_cast<std::uint16_t*>(low), numel);
}

void halves_join_with_bits(std::uintptr_t rounded, std::uintptr_t low, std::uintptr_t bits,
                           std::size_t first, std::uintptr_t weights, std::size_t numel) {
  const py::gil_scoped_release release;
  halves::join_with_bits(reinterpret_cast<const std::uint16_t*>(rounded),
                         reinterpret_cast<const std::uint16_t*>(low),
                         reinterpret_cast<const std::uint8_t*>(bits), first,
                         reinterpret_cast<std::uint32_t*>(weights), numel);
}

void halves_cut_with_bits(std::uintptr_t weights, std::uintptr_t rounded, std::uintptr_t low,
                          std::uintptr_t bits, std::size_t numel) {
  const py::gil_scoped_release release;
  halves::cut_with_bits(
      reinterpret_cast<const std::uint32_t*>(weights), reinterpret_cast<std::uint16_t*>(rounded),
      reinterpret_cast<std::uint16_t*>(low), reinterpret_cast<std::uint8_t*>(bits), numel);
}

std::optional<kernels::Rounding> rounding_of(std::optional<std::uint64_t> key,
                                             std::uint64_t first_index) {
  if (!key) return std::nullopt;
  return kernels::Rounding{.key = *key, .first_index = first_index};
}

void codes_encode(std::uintptr_t values, std::uintptr_t codes, std::uintptr_t scales,
                  std::size_t stride, std::size_t numel, bool is_first,
                  std::optional<std::uint64_t> rounding_key, std::uint64_t first_index) {
  const auto* source = reinterpret_cast<const float*>(values);
  const codes::Scales target{reinterpret_cast<float*>(scales), stride};
  const auto rounding = rounding_of(rounding_key, first_index);
  const py::gil_scoped_release release;
  if (is_first) {
    codes::encode_first(source, reinterpret_cast<std::int8_t*>(codes), target, numel, rounding);
  } else {
    codes::encode_second(source, reinterpret_cast<std::uint8_t*>(codes), target, numel, rounding);
  }
}

void codes_decode(std::uintptr_t codes, std::uintptr_t scales, std::size_t stride,
                  std::uintptr_t values, std::size_t numel, bool is_first) {
  auto* target = reinterpret_cast<float*>(values);
  const codes::Scales source{reinterpret_cast<float*>(scales), stride};
  const py::gil_scoped_release release;
  if (is_first) {
    codes::decode_first(reinterpret_cast<const std::int8_t*>(codes), source, target, numel);
  } else {
    codes::decode_second(reinterpret_cast<const std::uint8_t*>(codes), source, target, numel);
  }
}

void remainders_join(std::uintptr_t rounded, std::uintptr_t remainders, std::uintptr_t weights,
                     std::size_t numel) {
  const py::gil_scoped_release release;
  remainders::join(reinterpret_cast<const std::uint16_t*>(rounded),
                   reinterpret_cast<const std::int8_t*>(remainders),
                   reinterpret_cast<float*>(weights), numel);
}

void remainders_cut(std::uintptr_t weights, std::uintptr_t rounded, std::uintptr_t remainders,
                    std::size_t numel, std::optional<std::uint64_t> rounding_key,
                    std::uint64_t first_index) {
  const auto rounding = rounding_of(rounding_key, first_index);
  const py::gil_scoped_release release;
  remainders::cut(reinterpret_cast<const float*>(weights),
                  reinterpret_cast<std::uint16_t*>(rounded),
                  reinterpret_cast<std::int8_t*>(remainders), numel, rounding);
}

std::vector<std::string> kernel_isas() {
  std::vector<std::string> names;
  for (const kernels::Isa isa : kernels::available_isas()) names.emplace_back(kernels::name(isa));
  return names;
}

}  // namespace

void bind_kernels(py::module_& module) {
  py::class_<kernels::Helpers>(module, "KernelHelpers",
                               "Threads that kernels share, kept between calls.")
      .def(py::init<>())
      .def_property_readonly("thread_count", &kernels::Helpers::thread_count);
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
             "sum_squares"_a = false, "threads"_a = 0, "helpers"_a = nullptr, "isa"_a = "auto");
  module.def("kernel_isas", &kernel_isas);

  py::class_<adam::Coefficients>(module, "AdamCoefficients")
      .def(py::init<float, float, float, float, float, float, float, float, std::optional<float>,
                    std::optional<float>>(),
           py::kw_only(), "factor"_a, "beta1"_a, "beta2"_a, "take1"_a, "take2"_a, "root_scale"_a,
           "epsilon"_a, "step_size"_a, "gradient_decay"_a = py::none(),
           "weight_decay"_a = py::none());
  module.def("adam_update", &adam_update, py::kw_only(), "gradient"_a, "gradient_dtype"_a,
             "weight"_a, "exp_avg"_a, "exp_avg_sq"_a, "output"_a = 0, "output_dtype"_a = py::none(),
             "weight_dtype"_a = "float32", "moment_dtype"_a = "float32", "scales"_a = 0, "numel"_a,
             "coefficients"_a, "tail_numel"_a = 0, "rounding_key"_a = 0, "first_index"_a = 0,
             "threads"_a = 0, "helpers"_a = nullptr, "isa"_a = "auto");

  module.def("halves_join", &halves_join, py::kw_only(), "rounded"_a, "low"_a, "flags"_a = 0,
             "flag_dtype"_a = "float32", "weights"_a, "numel"_a);
  module.def("halves_cut", &halves_cut, py::kw_only(), "weights"_a, "high"_a, "low"_a, "numel"_a);
  module.def("halves_round_high", &halves_round_high, py::kw_only(), "high"_a, "low"_a, "flags"_a,
             "flag_dtype"_a, "numel"_a);
  module.def("halves_clear_flags", &halves_clear_flags, py::kw_only(), "flags"_a, "flag_dtype"_a,
             "numel"_a);
  module.def("halves_join_without_flags", &halves_join_without_flags, py::kw_only(), "rounded"_a,
             "low"_a, "weights"_a, "numel"_a);
  module.def("halves_round_high_without_flags", &halves_round_high_without_flags, py::kw_only(),
             "high"_a, "low"_a, "numel"_a);
  module.def("halves_join_with_bits", &halves_join_with_bits, py::kw_only(), "rounded"_a, "low"_a,
             "bits"_a, "first"_a = 0, "weights"_a, "numel"_a);
  module.def("halves_cut_with_bits", &halves_cut_with_bits, py::kw_only(), "weights"_a, "rounded"_a,
             "low"_a, "bits"_a, "numel"_a);

  module.def("codes_encode", &codes_encode, py::kw_only(), "values"_a, "codes"_a, "scales"_a,
             "stride"_a, "numel"_a, "is_first"_a, "rounding_key"_a = py::none(),
             "first_index"_a = 0);
  module.def("codes_decode", &codes_decode, py::kw_only(), "codes"_a, "scales"_a, "stride"_a,
             "values"_a, "numel"_a, "is_first"_a);
  module.def("remainders_join", &remainders_join, py::kw_only(), "rounded"_a, "remainders"_a,
             "weights"_a, "numel"_a);
  module.def("remainders_cut", &remainders_cut, py::kw_only(), "weights"_a, "rounded"_a,
             "remainders"_a, "numel"_a, "rounding_key"_a = py::none(), "first_index"_a = 0);
}

}  // namespace memascend

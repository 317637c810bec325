#include "kernels/isa.hpp"

#include <stdexcept>
#include <string>

#include "base/check.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace memascend::kernels {
namespace {

#if defined(__x86_64__)
/// AVX2, FMA and F16C (Haswell, Zen and later).
bool has_avx2() {
  // Some compilers' __builtin_cpu_supports does not know f16c, so that bit is read with cpuid.
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/// AVX-512 F and BW in addition (Skylake-SP, Zen 4 and later).
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && has_avx2();
}
#endif

}  // namespace

std::vector<Isa> available_isas() {
  std::vector<Isa> isas{Isa::kScalar};
#if defined(__x86_64__)
  if (has_avx2()) isas.push_back(Isa::kAvx2);
  if (has_avx512()) isas.push_back(Isa::kAvx512);
#endif
  return isas;
}

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kScalar:
      break;
  }
  return "scalar";
}

Isa parse_isa(std::string_view text) {
  const std::vector<Isa> isas = available_isas();
  if (text == "auto") return isas.back();
  std::string known = "auto";
  for (const Isa isa : isas) {
    if (text == name(isa)) return isa;
    known += join(", ", name(isa));
  }
  throw std::invalid_argument(
      join("isa=\"", text, "\" cannot run on this CPU; available: ", known));
}

}  // namespace memascend::kernels

// The overflow check with AVX-512 F and BW (Skylake-SP, Zen 4 and later).
//
// Compiled into every x86-64 build by function attributes; nothing here may run before
// kernels::available_isas() named it. The same as overflow_avx2.cpp with vectors twice as wide.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 sees uninitialized values in its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define MA_TARGET __attribute__((target("avx512f,avx512bw,f16c")))
#include "kernels/overflow_vector.hpp"

namespace memascend::overflow {
namespace {

struct Avx512 {
  using Vector = __m512i;
  using Sums = __m512d;

  template <typename F>
  MA_TARGET static Vector larger(Vector left, Vector right) {
    if constexpr (sizeof(typename F::Bits) == 4) return _mm512_max_epu32(left, right);
    return _mm512_max_epu16(left, right);
  }

  template <typename F>
  MA_TARGET static Vector load_magnitudes(const std::byte* source) {
    const Vector bits = _mm512_loadu_si512(source);
    if constexpr (sizeof(typename F::Bits) == 4) {
      return _mm512_and_si512(bits, _mm512_set1_epi32(F::kMagnitude));
    } else {
      return _mm512_and_si512(bits, _mm512_set1_epi16(F::kMagnitude));
    }
  }

  MA_TARGET static void add_squares(__m256 values, Sums& sums) {
    const __m512d wide = _mm512_cvtps_pd(values);
    sums = _mm512_fmadd_pd(wide, wide, sums);
  }

  MA_TARGET static void store(std::byte* target, Vector bits) { _mm512_storeu_si512(target, bits); }
  MA_TARGET static void store(double* target, Sums sums) { _mm512_storeu_pd(target, sums); }
};

}  // namespace

Kernels avx512_kernels(Format format) { return choose_kernels<VectorKernels<Avx512>>(format); }

}  // namespace memascend::overflow

#endif  // defined(__x86_64__)

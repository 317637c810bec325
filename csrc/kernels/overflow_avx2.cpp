// The overflow check with AVX2, FMA and F16C (Haswell, Zen and later).
//
// Compiled into every x86-64 build by function attributes; nothing here may run before
// kernels::available_isas() named it.
#if defined(__x86_64__)

#define MA_TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels/overflow_vector.hpp"

namespace memascend::overflow {
namespace {

struct Avx2 {
  using Vector = __m256i;
  struct Sums {
    __m256d low;
    __m256d high;
  };

  template <typename F>
  MA_TARGET static Vector larger(Vector left, Vector right) {
    if constexpr (sizeof(typename F::Bits) == 4) return _mm256_max_epu32(left, right);
    return _mm256_max_epu16(left, right);
  }

  template <typename F>
  MA_TARGET static Vector load_magnitudes(const std::byte* source) {
    const Vector bits = _mm256_loadu_si256(reinterpret_cast<const Vector*>(source));
    if constexpr (sizeof(typename F::Bits) == 4) {
      return _mm256_and_si256(bits, _mm256_set1_epi32(F::kMagnitude));
    } else {
      return _mm256_and_si256(bits, _mm256_set1_epi16(F::kMagnitude));
    }
  }

  MA_TARGET static void add_squares(__m256 values, Sums& sums) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    sums.low = _mm256_fmadd_pd(low, low, sums.low);
    sums.high = _mm256_fmadd_pd(high, high, sums.high);
  }

  MA_TARGET static void store(std::byte* target, Vector bits) {
    _mm256_storeu_si256(reinterpret_cast<Vector*>(target), bits);
  }

  MA_TARGET static void store(double* target, const Sums& sums) {
    _mm256_storeu_pd(target, sums.low);
    _mm256_storeu_pd(target + 4, sums.high);
  }
};

}  // namespace

Kernels avx2_kernels(Format format) { return choose_kernels<VectorKernels<Avx2>>(format); }

}  // namespace memascend::overflow

#endif  // defined(__x86_64__)

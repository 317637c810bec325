// The Adam step with AVX-512 F (Skylake-SP, Zen 4 and later).
//
// Compiled into every x86-64 build by function attributes; nothing here may run before
// kernels::available_isas() named it. The same as adam_avx2.cpp with vectors twice as wide.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 sees uninitialized values in its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#define MA_TARGET __attribute__((target("avx512f,avx512bw,avx2,fma,f16c")))
#include "kernels/adam_loops.hpp"

namespace memascend::adam {
namespace {

struct Avx512 {
  using Lanes = __m512;
  static constexpr std::size_t kWidth = 16;

  MA_TARGET static Lanes load(const std::byte* source) { return _mm512_loadu_ps(source); }
  MA_TARGET static void store(std::byte* target, Lanes values) { _mm512_storeu_ps(target, values); }

  template <typename F>
  MA_TARGET static Lanes load(const std::byte* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    if constexpr (std::is_same_v<F, Float16>) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  template <typename F>
  MA_TARGET static void store(std::byte* target, Lanes values) {
    __m256i narrow;
    if constexpr (std::is_same_v<F, Float16>) {
      narrow = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
    } else {
      const __m512i bits = _mm512_castps_si512(values);
      const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i bias = _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff));
      const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
      const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
      const __m512i wide =
          _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(Bfloat16::kNan));
      narrow = _mm512_cvtepi32_epi16(wide);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow);
  }

  MA_TARGET static Lanes spread(float value) { return _mm512_set1_ps(value); }
  MA_TARGET static Lanes mul(Lanes left, Lanes right) { return _mm512_mul_ps(left, right); }
  MA_TARGET static Lanes div(Lanes left, Lanes right) { return _mm512_div_ps(left, right); }
  MA_TARGET static Lanes fma(Lanes left, Lanes right, Lanes addend) {
    return _mm512_fmadd_ps(left, right, addend);
  }
  MA_TARGET static Lanes root(Lanes values) { return _mm512_sqrt_ps(values); }
};

}  // namespace

Kernels avx512_kernels(Format gradient, std::optional<Format> output) {
  return Loops<Avx512>::choose(gradient, output);
}

}  // namespace memascend::adam

#endif  // defined(__x86_64__)

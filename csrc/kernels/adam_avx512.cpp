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
  using Words = __m512i;
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
    if constexpr (std::is_same_v<F, Float16>) {
      const __m256i narrow = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow);
    } else {
      store_words16(target, to_bfloat16(values));
    }
  }

  MA_TARGET static Words to_bfloat16(Lanes values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return to_bfloat16(values, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
  }
  MA_TARGET static Words to_bfloat16(Lanes values, Words addend) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, addend), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(Bfloat16::kNan));
  }

  MA_TARGET static Lanes spread(float value) { return _mm512_set1_ps(value); }
  MA_TARGET static Lanes mul(Lanes left, Lanes right) { return _mm512_mul_ps(left, right); }
  MA_TARGET static Lanes div(Lanes left, Lanes right) { return _mm512_div_ps(left, right); }
  MA_TARGET static Lanes fma(Lanes left, Lanes right, Lanes addend) {
    return _mm512_fmadd_ps(left, right, addend);
  }
  MA_TARGET static Lanes root(Lanes values) { return _mm512_sqrt_ps(values); }
  MA_TARGET static Lanes plus(Lanes left, Lanes right) { return _mm512_add_ps(left, right); }
  MA_TARGET static Lanes minus(Lanes left, Lanes right) { return _mm512_sub_ps(left, right); }
  MA_TARGET static Lanes least(Lanes left, Lanes right) { return _mm512_min_ps(left, right); }
  MA_TARGET static Lanes floor(Lanes values) {
    return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  MA_TARGET static Lanes plus_one_if_less(Lanes values, Lanes left, Lanes right) {
    const __mmask16 is_less = _mm512_cmp_ps_mask(left, right, _CMP_LT_OQ);
    return _mm512_mask_add_ps(values, is_less, values, _mm512_set1_ps(1.0f));
  }
  MA_TARGET static Lanes convert(Words words) { return _mm512_cvtepi32_ps(words); }
  MA_TARGET static Words integers(Lanes values) { return _mm512_cvttps_epi32(values); }

  MA_TARGET static Words load_words16(const std::byte* source) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }
  /// Of words below 2^16.
  MA_TARGET static void store_words16(std::byte* target, Words words) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(words));
  }
  MA_TARGET static Words load_words8(const std::byte* source) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  MA_TARGET static Words load_signed8(const std::byte* source) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  MA_TARGET static void store_words8(std::byte* target, Words words) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(words));
  }
  MA_TARGET static Words bits(Lanes values) { return _mm512_castps_si512(values); }
  MA_TARGET static Lanes floats(Words words) { return _mm512_castsi512_ps(words); }
  MA_TARGET static Words words(std::uint32_t word) {
    return _mm512_set1_epi32(static_cast<int>(word));
  }
  MA_TARGET static Words count_from(std::uint32_t first) {
    return _mm512_add_epi32(
        words(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  MA_TARGET static Words exclusive_or(Words left, Words right) {
    return _mm512_xor_si512(left, right);
  }
  MA_TARGET static Words both(Words left, Words right) { return _mm512_and_si512(left, right); }
  MA_TARGET static Words either(Words left, Words right) { return _mm512_or_si512(left, right); }
  MA_TARGET static Words add(Words left, Words right) { return _mm512_add_epi32(left, right); }
  MA_TARGET static Words subtract(Words left, Words right) { return _mm512_sub_epi32(left, right); }
  MA_TARGET static Words least_of(Words left, Words right) { return _mm512_min_epi32(left, right); }
  MA_TARGET static Words greatest_of(Words left, Words right) {
    return _mm512_max_epi32(left, right);
  }
  MA_TARGET static std::uint32_t greatest_lane(Words words) {
    return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(words));
  }
  MA_TARGET static Words multiply(Words left, Words right) {
    return _mm512_mullo_epi32(left, right);
  }
  MA_TARGET static Words cut_to_16(Words words) {
    return _mm512_and_si512(words, _mm512_set1_epi32(0xffff));
  }
  template <int kCount>
  MA_TARGET static Words shift_left(Words words) {
    return _mm512_slli_epi32(words, kCount);
  }
  template <int kCount>
  MA_TARGET static Words shift_right(Words words) {
    return _mm512_srli_epi32(words, kCount);
  }
  template <int kCount>
  MA_TARGET static Words shift_right_signed(Words words) {
    return _mm512_srai_epi32(words, kCount);
  }
};

}  // namespace

Kernels avx512_kernels(const Formats& formats) { return Loops<Avx512>::choose(formats); }

}  // namespace memascend::adam

#endif  // defined(__x86_64__)

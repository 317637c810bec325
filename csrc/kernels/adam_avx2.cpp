// The Adam step with AVX2, FMA and F16C (Haswell, Zen and later).
//
// Compiled into every x86-64 build by function attributes; nothing here may run before
// kernels::available_isas() named it.
#if defined(__x86_64__)

#include <immintrin.h>

#define MA_TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels/adam_loops.hpp"

namespace memascend::adam {
namespace {

struct Avx2 {
  using Lanes = __m256;
  using Words = __m256i;
  static constexpr std::size_t kWidth = 8;

  MA_TARGET static Lanes load(const std::byte* source) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(source));
  }
  MA_TARGET static void store(std::byte* target, Lanes values) {
    _mm256_storeu_ps(reinterpret_cast<float*>(target), values);
  }

  template <typename F>
  MA_TARGET static Lanes load(const std::byte* source) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    if constexpr (std::is_same_v<F, Float16>) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  template <typename F>
  MA_TARGET static void store(std::byte* target, Lanes values) {
    if constexpr (std::is_same_v<F, Float16>) {
      const __m128i narrow = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), narrow);
    } else {
      store_words16(target, to_bfloat16(values));
    }
  }

  MA_TARGET static Words to_bfloat16(Lanes values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return to_bfloat16(values, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  }
  MA_TARGET static Words to_bfloat16(Lanes values, Words addend) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, addend), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(Bfloat16::kNan), is_nan);
  }

  MA_TARGET static Lanes spread(float value) { return _mm256_set1_ps(value); }
  MA_TARGET static Lanes mul(Lanes left, Lanes right) { return _mm256_mul_ps(left, right); }
  MA_TARGET static Lanes div(Lanes left, Lanes right) { return _mm256_div_ps(left, right); }
  MA_TARGET static Lanes fma(Lanes left, Lanes right, Lanes addend) {
    return _mm256_fmadd_ps(left, right, addend);
  }
  MA_TARGET static Lanes root(Lanes values) { return _mm256_sqrt_ps(values); }
  MA_TARGET static Lanes plus(Lanes left, Lanes right) { return _mm256_add_ps(left, right); }
  MA_TARGET static Lanes minus(Lanes left, Lanes right) { return _mm256_sub_ps(left, right); }
  MA_TARGET static Lanes least(Lanes left, Lanes right) { return _mm256_min_ps(left, right); }
  MA_TARGET static Lanes floor(Lanes values) { return _mm256_floor_ps(values); }
  MA_TARGET static Lanes plus_one_if_less(Lanes values, Lanes left, Lanes right) {
    const __m256 is_less = _mm256_cmp_ps(left, right, _CMP_LT_OQ);
    return _mm256_add_ps(values, _mm256_and_ps(is_less, _mm256_set1_ps(1.0f)));
  }
  MA_TARGET static Lanes convert(Words words) { return _mm256_cvtepi32_ps(words); }
  MA_TARGET static Words integers(Lanes values) { return _mm256_cvttps_epi32(values); }

  MA_TARGET static Words load_words16(const std::byte* source) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  /// Of words below 2^16.
  MA_TARGET static void store_words16(std::byte* target, Words words) {
    // Each half is packed by itself; 0x08 puts the results next to each other.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
  }
  MA_TARGET static Words load_words8(const std::byte* source) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
  }
  MA_TARGET static Words load_signed8(const std::byte* source) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
  }
  MA_TARGET static void store_words8(std::byte* target, Words words) {
    // The lowest byte of each word, packed in each half by itself.
    const __m256i chosen = _mm256_shuffle_epi8(words, _mm256_set1_epi32(0x0c080400));
    const __m256i packed =
        _mm256_permutevar8x32_epi32(chosen, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
  }
  MA_TARGET static Words bits(Lanes values) { return _mm256_castps_si256(values); }
  MA_TARGET static Lanes floats(Words words) { return _mm256_castsi256_ps(words); }
  MA_TARGET static Words words(std::uint32_t word) {
    return _mm256_set1_epi32(static_cast<int>(word));
  }
  MA_TARGET static Words count_from(std::uint32_t first) {
    return _mm256_add_epi32(words(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  MA_TARGET static Words exclusive_or(Words left, Words right) {
    return _mm256_xor_si256(left, right);
  }
  MA_TARGET static Words both(Words left, Words right) { return _mm256_and_si256(left, right); }
  MA_TARGET static Words either(Words left, Words right) { return _mm256_or_si256(left, right); }
  MA_TARGET static Words add(Words left, Words right) { return _mm256_add_epi32(left, right); }
  MA_TARGET static Words subtract(Words left, Words right) { return _mm256_sub_epi32(left, right); }
  MA_TARGET static Words least_of(Words left, Words right) { return _mm256_min_epi32(left, right); }
  MA_TARGET static Words greatest_of(Words left, Words right) {
    return _mm256_max_epi32(left, right);
  }
  MA_TARGET static std::uint32_t greatest_lane(Words words) {
    __m128i left = _mm_max_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    left = _mm_max_epi32(left, _mm_shuffle_epi32(left, 0x4e));
    left = _mm_max_epi32(left, _mm_shuffle_epi32(left, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(left));
  }
  MA_TARGET static Words multiply(Words left, Words right) {
    return _mm256_mullo_epi32(left, right);
  }
  MA_TARGET static Words cut_to_16(Words words) {
    return _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
  }
  template <int kCount>
  MA_TARGET static Words shift_left(Words words) {
    return _mm256_slli_epi32(words, kCount);
  }
  template <int kCount>
  MA_TARGET static Words shift_right(Words words) {
    return _mm256_srli_epi32(words, kCount);
  }
  template <int kCount>
  MA_TARGET static Words shift_right_signed(Words words) {
    return _mm256_srai_epi32(words, kCount);
  }
};

}  // namespace

Kernels avx2_kernels(const Formats& formats) { return Loops<Avx2>::choose(formats); }

}  // namespace memascend::adam

#endif  // defined(__x86_64__)

// The overflow check with AVX-512 F and BW (Skylake-SP, Zen 4 and later).
//
// Compiled into every x86-64 build by function attributes; nothing here may run before has_avx512()
// said yes. The same shape as overflow_avx2.cpp with vectors twice as wide.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 sees uninitialized values in its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "kernels/overflow_block.hpp"

#define MA_AVX512 __attribute__((target("avx512f,avx512bw,f16c")))

namespace memascend::overflow {
namespace {

constexpr std::size_t kVectorBytes = sizeof(__m512i);
constexpr std::size_t kVectors = 4;  // per turn of the loop, to hide latencies

template <typename F>
MA_AVX512 __m512i larger(__m512i left, __m512i right) {
  if constexpr (sizeof(typename F::Bits) == 4) {
    return _mm512_max_epu32(left, right);
  } else {
    return _mm512_max_epu16(left, right);
  }
}

template <typename F>
MA_AVX512 __m512i load_magnitudes(const std::byte* source) {
  const __m512i bits = _mm512_loadu_si512(source);
  if constexpr (sizeof(typename F::Bits) == 4) {
    return _mm512_and_si512(bits, _mm512_set1_epi32(F::kMagnitude));
  } else {
    return _mm512_and_si512(bits, _mm512_set1_epi16(F::kMagnitude));
  }
}

/// Keeps the largest magnitude seen in each place and compares once, at the end.
template <typename F>
MA_AVX512 bool find(const std::byte* source, std::size_t numel) {
  constexpr std::size_t kVectorNumel = kVectorBytes / sizeof(typename F::Bits);
  constexpr std::size_t kTurnNumel = kVectors * kVectorNumel;
  __m512i largest0 = _mm512_setzero_si512();
  __m512i largest1 = largest0;
  __m512i largest2 = largest0;
  __m512i largest3 = largest0;
  std::size_t index = 0;
  for (; index + kTurnNumel <= numel; index += kTurnNumel) {
    const std::byte* turn = source + index * sizeof(typename F::Bits);
    largest0 = larger<F>(largest0, load_magnitudes<F>(turn));
    largest1 = larger<F>(largest1, load_magnitudes<F>(turn + kVectorBytes));
    largest2 = larger<F>(largest2, load_magnitudes<F>(turn + 2 * kVectorBytes));
    largest3 = larger<F>(largest3, load_magnitudes<F>(turn + 3 * kVectorBytes));
  }
  largest0 = larger<F>(larger<F>(largest0, largest1), larger<F>(largest2, largest3));
  std::array<std::byte, kVectorBytes> magnitudes;
  _mm512_storeu_si512(magnitudes.data(), largest0);
  const bool found = finish_find<F>(false, magnitudes.data(), 0, kVectorNumel);
  return finish_find<F>(found, source, index, numel);
}

template <typename F>
MA_AVX512 __m256 load_eight(const std::byte* source) {
  if constexpr (sizeof(typename F::Bits) == 4) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(source));
  } else {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    if constexpr (F::kInfinity == Float16::kInfinity) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
}

/// Adds the squares of eight elements to eight lanes.
template <typename F>
MA_AVX512 void add_eight(const std::byte* source, __m512d& sums) {
  const __m512d values = _mm512_cvtps_pd(load_eight<F>(source));
  sums = _mm512_fmadd_pd(values, values, sums);
}

template <typename F>
MA_AVX512 double sum(const std::byte* source, std::size_t numel) {
  constexpr std::size_t kEightBytes = 8 * sizeof(typename F::Bits);
  __m512d sums0 = _mm512_setzero_pd();
  __m512d sums1 = sums0;
  __m512d sums2 = sums0;
  __m512d sums3 = sums0;
  std::size_t index = 0;
  for (; index + kLanes <= numel; index += kLanes) {
    const std::byte* turn = source + index * sizeof(typename F::Bits);
    add_eight<F>(turn, sums0);
    add_eight<F>(turn + kEightBytes, sums1);
    add_eight<F>(turn + 2 * kEightBytes, sums2);
    add_eight<F>(turn + 3 * kEightBytes, sums3);
  }
  std::array<double, kLanes> lanes;
  _mm512_storeu_pd(lanes.data(), sums0);
  _mm512_storeu_pd(lanes.data() + 8, sums1);
  _mm512_storeu_pd(lanes.data() + 16, sums2);
  _mm512_storeu_pd(lanes.data() + 24, sums3);
  return finish_sum<F>(lanes, source, index, numel);
}

}  // namespace

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && has_avx2();
}

Kernels avx512_kernels(Format format) {
  switch (format) {
    case Format::kFloat16:
      return {find<Float16>, sum<Float16>};
    case Format::kBfloat16:
      return {find<Bfloat16>, sum<Bfloat16>};
    case Format::kFloat32:
      break;
  }
  return {find<Float32>, sum<Float32>};
}

}  // namespace memascend::overflow

#endif  // defined(__x86_64__)

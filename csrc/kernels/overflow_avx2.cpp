// The overflow check with AVX2, FMA and F16C (Haswell, Zen and later).
//
// Compiled into every x86-64 build by function attributes; nothing here may run before has_avx2()
// said yes. All loads are unaligned ones, which cost nothing on memory that happens to be aligned.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include "kernels/overflow_block.hpp"

#define MA_AVX2 __attribute__((target("avx2,fma,f16c")))

namespace memascend::overflow {
namespace {

constexpr std::size_t kVectorBytes = sizeof(__m256i);
constexpr std::size_t kVectors = 4;  // per turn of the loop, to hide latencies

template <typename F>
MA_AVX2 __m256i larger(__m256i left, __m256i right) {
  if constexpr (sizeof(typename F::Bits) == 4) {
    return _mm256_max_epu32(left, right);
  } else {
    return _mm256_max_epu16(left, right);
  }
}

template <typename F>
MA_AVX2 __m256i load_magnitudes(const std::byte* source) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  if constexpr (sizeof(typename F::Bits) == 4) {
    return _mm256_and_si256(bits, _mm256_set1_epi32(F::kMagnitude));
  } else {
    return _mm256_and_si256(bits, _mm256_set1_epi16(F::kMagnitude));
  }
}

/// Keeps the largest magnitude seen in each place and compares once, at the end.
template <typename F>
MA_AVX2 bool find(const std::byte* source, std::size_t numel) {
  constexpr std::size_t kVectorNumel = kVectorBytes / sizeof(typename F::Bits);
  constexpr std::size_t kTurnNumel = kVectors * kVectorNumel;
  __m256i largest0 = _mm256_setzero_si256();
  __m256i largest1 = largest0;
  __m256i largest2 = largest0;
  __m256i largest3 = largest0;
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
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(magnitudes.data()), largest0);
  const bool found = finish_find<F>(false, magnitudes.data(), 0, kVectorNumel);
  return finish_find<F>(found, source, index, numel);
}

template <typename F>
MA_AVX2 __m256 load_eight(const std::byte* source) {
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
MA_AVX2 void add_eight(const std::byte* source, __m256d& low_sums, __m256d& high_sums) {
  const __m256 values = load_eight<F>(source);
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
  low_sums = _mm256_fmadd_pd(low, low, low_sums);
  high_sums = _mm256_fmadd_pd(high, high, high_sums);
}

template <typename F>
MA_AVX2 double sum(const std::byte* source, std::size_t numel) {
  constexpr std::size_t kEightBytes = 8 * sizeof(typename F::Bits);
  __m256d sums0 = _mm256_setzero_pd();
  __m256d sums1 = sums0;
  __m256d sums2 = sums0;
  __m256d sums3 = sums0;
  __m256d sums4 = sums0;
  __m256d sums5 = sums0;
  __m256d sums6 = sums0;
  __m256d sums7 = sums0;
  std::size_t index = 0;
  for (; index + kLanes <= numel; index += kLanes) {
    const std::byte* turn = source + index * sizeof(typename F::Bits);
    add_eight<F>(turn, sums0, sums1);
    add_eight<F>(turn + kEightBytes, sums2, sums3);
    add_eight<F>(turn + 2 * kEightBytes, sums4, sums5);
    add_eight<F>(turn + 3 * kEightBytes, sums6, sums7);
  }
  std::array<double, kLanes> lanes;
  _mm256_storeu_pd(lanes.data(), sums0);
  _mm256_storeu_pd(lanes.data() + 4, sums1);
  _mm256_storeu_pd(lanes.data() + 8, sums2);
  _mm256_storeu_pd(lanes.data() + 12, sums3);
  _mm256_storeu_pd(lanes.data() + 16, sums4);
  _mm256_storeu_pd(lanes.data() + 20, sums5);
  _mm256_storeu_pd(lanes.data() + 24, sums6);
  _mm256_storeu_pd(lanes.data() + 28, sums7);
  return finish_sum<F>(lanes, source, index, numel);
}

}  // namespace

bool has_avx2() {
  // Not every compiler's __builtin_cpu_supports knows f16c, so that bit is read from cpuid itself.
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

Kernels avx2_kernels(Format format) {
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

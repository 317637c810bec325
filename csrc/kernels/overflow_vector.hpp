// The loops of the vector kernels. The instructions come from `Set`, a struct with:
//
//   Vector, Sums                  a vector of bits; the sums of eight lanes
//   larger<F>(Vector, Vector)     the larger magnitude in each place
//   load_magnitudes<F>(source)    a vector of elements without their signs
//   add_squares(values, &sums)    adds the squares of eight floats to eight lanes
//   store(target, Vector or Sums)
//
// Included by overflow_avx2.cpp and overflow_avx512.cpp only, which define MA_TARGET before: the
// attribute of every function that uses the set's instructions. All loads are unaligned ones, which
// cost nothing on aligned memory.
#pragma once

#include <immintrin.h>

#include "kernels/overflow_block.hpp"

namespace memascend::overflow {
namespace {  // the attribute differs from file to file

template <typename F>
MA_TARGET __m256 load_eight(const std::byte* source) {
  if constexpr (sizeof(typename F::Bits) == 4) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(source));
  } else {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    if constexpr (F::kInfinity == Float16::kInfinity) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
}

/// Four vectors in each turn of a loop, to hide latencies.
template <typename Set>
struct VectorKernels {
  using Vector = typename Set::Vector;
  using Sums = typename Set::Sums;

  /// Keeps the largest magnitude seen in each place and compares once, at the end.
  template <typename F>
  MA_TARGET static bool find(const std::byte* source, std::size_t numel) {
    constexpr std::size_t kVectorNumel = sizeof(Vector) / sizeof(typename F::Bits);
    constexpr std::size_t kTurnNumel = 4 * kVectorNumel;
    Vector largest0{};
    Vector largest1{};
    Vector largest2{};
    Vector largest3{};
    std::size_t index = 0;
    for (; index + kTurnNumel <= numel; index += kTurnNumel) {
      const std::byte* turn = source + index * sizeof(typename F::Bits);
      largest0 = Set::template larger<F>(largest0, Set::template load_magnitudes<F>(turn));
      turn += sizeof(Vector);
      largest1 = Set::template larger<F>(largest1, Set::template load_magnitudes<F>(turn));
      turn += sizeof(Vector);
      largest2 = Set::template larger<F>(largest2, Set::template load_magnitudes<F>(turn));
      turn += sizeof(Vector);
      largest3 = Set::template larger<F>(largest3, Set::template load_magnitudes<F>(turn));
    }
    largest0 = Set::template larger<F>(largest0, largest1);
    largest2 = Set::template larger<F>(largest2, largest3);
    std::array<std::byte, sizeof(Vector)> magnitudes;
    Set::store(magnitudes.data(), Set::template larger<F>(largest0, largest2));
    const bool found = finish_find<F>(false, magnitudes.data(), 0, kVectorNumel);
    return finish_find<F>(found, source, index, numel);
  }

  template <typename F>
  MA_TARGET static double sum(const std::byte* source, std::size_t numel) {
    constexpr std::size_t kEightBytes = 8 * sizeof(typename F::Bits);
    Sums sums0{};
    Sums sums1{};
    Sums sums2{};
    Sums sums3{};
    std::size_t index = 0;
    for (; index + kLanes <= numel; index += kLanes) {
      const std::byte* turn = source + index * sizeof(typename F::Bits);
      Set::add_squares(load_eight<F>(turn), sums0);
      Set::add_squares(load_eight<F>(turn + kEightBytes), sums1);
      Set::add_squares(load_eight<F>(turn + 2 * kEightBytes), sums2);
      Set::add_squares(load_eight<F>(turn + 3 * kEightBytes), sums3);
    }
    std::array<double, kLanes> lanes;
    Set::store(lanes.data(), sums0);
    Set::store(lanes.data() + 8, sums1);
    Set::store(lanes.data() + 16, sums2);
    Set::store(lanes.data() + 24, sums3);
    return finish_sum<F>(lanes, source, index, numel);
  }
};

}  // namespace
}  // namespace memascend::overflow

// Shared by the kernels of all instruction sets: the number formats, the lanes that fix the order
// of additions, and the table of the dispatcher. Included by kernels/overflow*.cpp only.
//
// A kernel works on one block and keeps no state. Element i of a block is added to lane i mod
// kLanes and the lanes are added pairwise at the end, so kernels of any vector width give the same
// bits (squares are exact in double: a fused multiply-add rounds as a multiplication and an
// addition do).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/overflow.hpp"

namespace memascend::overflow {

/// Enough for eight accumulators of four doubles, which hide the latency of an addition.
inline constexpr std::size_t kLanes = 32;

/// True if any of `numel` elements is inf or nan.
using FindKernel = bool (*)(const std::byte* source, std::size_t numel);
/// The sum of squares; not finite if and only if an element is not.
using SumKernel = double (*)(const std::byte* source, std::size_t numel);

struct Kernels {
  FindKernel find;
  SumKernel sum;
};

Kernels scalar_kernels(Format format);
#if defined(__x86_64__)
Kernels avx2_kernels(Format format);
Kernels avx512_kernels(Format format);
#endif

// A format is described by its bits without the sign: they sort like the magnitudes, and a value is
// inf or nan if they are at least kInfinity (all ones in the exponent).

struct Float32 {
  using Bits = std::uint32_t;
  static constexpr Bits kMagnitude = 0x7fffffff;
  static constexpr Bits kInfinity = 0x7f800000;
  static double widen(Bits bits) { return std::bit_cast<float>(bits); }
};

struct Bfloat16 {
  using Bits = std::uint16_t;
  static constexpr Bits kMagnitude = 0x7fff;
  static constexpr Bits kInfinity = 0x7f80;
  static double widen(Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

struct Float16 {
  using Bits = std::uint16_t;
  static constexpr Bits kMagnitude = 0x7fff;
  static constexpr Bits kInfinity = 0x7c00;
  /// The magnitude only: squaring drops the sign anyway.
  static double widen(Bits bits) {
    const std::uint64_t magnitude = bits & kMagnitude;
    // Exponent and fraction are moved to their places in a double; the factor corrects the
    // exponent's bias and normalizes subnormals.
    const double scaled = std::bit_cast<double>(magnitude << 42) * 0x1p1008;
    return magnitude < kInfinity ? scaled
                                 : std::bit_cast<double>(0x7ff0000000000000 | magnitude << 42);
  }
};

template <typename F>
typename F::Bits load_bits(const std::byte* source, std::size_t index) {
  typename F::Bits bits;
  std::memcpy(&bits, source + index * sizeof(bits), sizeof(bits));
  return bits;
}

template <typename F>
bool is_non_finite(typename F::Bits bits) {
  return (bits & F::kMagnitude) >= F::kInfinity;
}

/// Adds the squares of the elements from `first` (a multiple of kLanes) to `numel`, then all lanes.
template <typename F>
double finish_sum(std::array<double, kLanes>& lanes, const std::byte* source, std::size_t first,
                  std::size_t numel) {
  for (std::size_t index = first; index < numel; ++index) {
    const double value = F::widen(load_bits<F>(source, index));
    lanes[index % kLanes] += value * value;
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <typename F>
bool finish_find(bool found, const std::byte* source, std::size_t first, std::size_t numel) {
  for (std::size_t index = first; index < numel; ++index) {
    found |= is_non_finite<F>(load_bits<F>(source, index));
  }
  return found;
}

/// The kernels of a format, from an instruction set's templates.
template <typename Set>
Kernels choose_kernels(Format format) {
  switch (format) {
    case Format::kFloat16:
      return {Set::template find<Float16>, Set::template sum<Float16>};
    case Format::kBfloat16:
      return {Set::template find<Bfloat16>, Set::template sum<Bfloat16>};
    case Format::kFloat32:
      break;
  }
  return {Set::template find<Float32>, Set::template sum<Float32>};
}

}  // namespace memascend::overflow

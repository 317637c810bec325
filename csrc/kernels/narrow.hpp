// Numbers of 16 bits, widened to floats and rounded from them, one at a time.
#pragma once

#include <bit>
#include <cstdint>

namespace memascend::kernels {

struct Float32 {
  using Bits = std::uint32_t;
};

struct Bfloat16 {
  using Bits = std::uint16_t;
  static constexpr Bits kNan = 0x7fc0;
  static float widen(Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static Bits narrow(float value) {
    return add_and_cut(value, 0x7fff + (std::bit_cast<std::uint32_t>(value) >> 16 & 1));
  }
  /// Rounds away from zero if addend, below 2^16, plus the bits cut off is 2^16 or more.
  static Bits add_and_cut(float value, std::uint32_t addend) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return kNan;
    return static_cast<Bits>((bits + addend) >> 16);
  }
};

struct Float16 {
  using Bits = std::uint16_t;
  /// The difference of the exponents' biases, at the place of a float's exponent.
  static constexpr std::uint32_t kBias = std::uint32_t{127 - 15} << 23;

  static float widen(Bits bits) {
    const std::uint32_t magnitude = bits & 0x7fff;
    const std::uint32_t sign = std::uint32_t{bits} >> 15 << 31;
    std::uint32_t wide = (magnitude << 13) + kBias;
    if (magnitude < 0x0400) {  // subnormal in fp16, normal in a float
      wide = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
    } else if (magnitude >= 0x7c00) {
      wide += kBias;
    }
    return std::bit_cast<float>(sign | wide);
  }

  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 31 << 15;
    const std::uint32_t magnitude = bits & 0x7fffffff;
    std::uint32_t result = 0;
    if (magnitude > 0x7f800000) {
      result = 0x7e00;
    } else if (magnitude >= 0x47800000) {  // 65536 and more
      result = 0x7c00;
    } else if (magnitude < 0x38800000) {
      // Subnormal in fp16: next to 0.5, a float's last place is that of the result.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      result = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000;
    } else {
      result = (magnitude - kBias + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    return static_cast<Bits>(sign | result);
  }
};

}  // namespace memascend::kernels

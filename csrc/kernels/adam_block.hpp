// Shared by the Adam kernels of all instruction sets: the scalar set, and the table of the
// dispatcher. Included by the sources of this folder only.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/adam.hpp"
#include "kernels/codes.hpp"
#include "kernels/narrow.hpp"

namespace memascend::adam {

/// A run of elements for one kernel, with one order of operations.
struct Block {
  const std::byte* gradient;
  std::byte* weight;
  std::byte* exp_avg;
  std::byte* exp_avg_sq;
  float* scales;
  std::byte* output;
  std::size_t numel;
  kernels::Rounding rounding;
};

using Kernel = void (*)(const Block& block, const Coefficients& coefficients);

struct Kernels {
  Kernel body;
  Kernel tail;  // null with codes
};

/// The formats that a kernel is compiled for.
struct Formats {
  Format gradient;
  Moments moments;
  std::optional<Format> output;  // absent without 16-bit weights
  Weights weights;               // the output is bf16 unless they are whole
};

Kernels scalar_kernels(const Formats& formats);
#if defined(__x86_64__)
Kernels avx2_kernels(const Formats& formats);
Kernels avx512_kernels(const Formats& formats);
#endif

using kernels::Bfloat16;
using kernels::Float16;
using kernels::Float32;

// How a weight lies: whole and with an output in a format or without one; or with the output in
// bf16 and something else in the weight's place.
struct NoOutput {};
struct Split {};
struct Remainder {};
// How moments lie in codes: both, or the first ones.
struct Codes {
  static constexpr std::size_t kScales = 2;
};
struct FirstInCodes {
  static constexpr std::size_t kScales = 1;
};

template <typename T>
T load_as(const std::byte* source) {
  T value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

/// A single lane in plain C++; a set of instructions as in adam_element.hpp.
struct One {
  using Lanes = float;
  using Words = std::uint32_t;
  static constexpr std::size_t kWidth = 1;

  static float load(const std::byte* source) { return load_as<float>(source); }
  static void store(std::byte* target, float value) { std::memcpy(target, &value, sizeof(value)); }
  template <typename F>
  static float load(const std::byte* source) {
    return F::widen(load_as<typename F::Bits>(source));
  }
  template <typename F>
  static void store(std::byte* target, float value) {
    const typename F::Bits bits = F::narrow(value);
    std::memcpy(target, &bits, sizeof(bits));
  }
  static Words to_bfloat16(float value) { return Bfloat16::narrow(value); }
  static Words to_bfloat16(float value, Words addend) {
    return Bfloat16::add_and_cut(value, addend);
  }
  static float spread(float value) { return value; }
  static float mul(float left, float right) { return left * right; }
  static float div(float left, float right) { return left / right; }
  static float fma(float left, float right, float addend) { return std::fma(left, right, addend); }
  static float root(float value) { return std::sqrt(value); }
  static float plus(float left, float right) { return left + right; }
  static float minus(float left, float right) { return left - right; }
  static float least(float left, float right) { return left < right ? left : right; }
  static float floor(float value) { return convert(integers(value)); }
  static float plus_one_if_less(float value, float left, float right) {
    return left < right ? value + 1.0f : value;
  }
  static float convert(Words words) { return static_cast<float>(static_cast<std::int32_t>(words)); }
  static Words integers(float value) {
    return static_cast<Words>(static_cast<std::int32_t>(value));
  }

  static Words load_words16(const std::byte* source) { return load_as<std::uint16_t>(source); }
  static void store_words16(std::byte* target, Words words) {
    const auto bits = static_cast<std::uint16_t>(words);
    std::memcpy(target, &bits, sizeof(bits));
  }
  static Words load_words8(const std::byte* source) { return load_as<std::uint8_t>(source); }
  static Words load_signed8(const std::byte* source) {
    return static_cast<Words>(std::int32_t{load_as<std::int8_t>(source)});
  }
  static void store_words8(std::byte* target, Words words) {
    *target = static_cast<std::byte>(words & 0xff);
  }
  static Words bits(float value) { return std::bit_cast<Words>(value); }
  static float floats(Words words) { return std::bit_cast<float>(words); }
  static Words words(std::uint32_t word) { return word; }
  static Words count_from(std::uint32_t first) { return first; }
  static Words exclusive_or(Words left, Words right) { return left ^ right; }
  static Words both(Words left, Words right) { return left & right; }
  static Words either(Words left, Words right) { return left | right; }
  static Words add(Words left, Words right) { return left + right; }
  static Words subtract(Words left, Words right) { return left - right; }
  static Words least_of(Words left, Words right) {
    return static_cast<std::int32_t>(left) < static_cast<std::int32_t>(right) ? left : right;
  }
  static Words greatest_of(Words left, Words right) {
    return static_cast<std::int32_t>(left) < static_cast<std::int32_t>(right) ? right : left;
  }
  static std::uint32_t greatest_lane(Words words) { return words; }
  static Words multiply(Words left, Words right) { return left * right; }
  static Words cut_to_16(Words words) { return words & 0xffff; }
  template <int kCount>
  static Words shift_left(Words words) {
    return words << kCount;
  }
  template <int kCount>
  static Words shift_right(Words words) {
    return words >> kCount;
  }
  template <int kCount>
  static Words shift_right_signed(Words words) {
    return static_cast<Words>(static_cast<std::int32_t>(words) >> kCount);
  }
};

}  // namespace memascend::adam

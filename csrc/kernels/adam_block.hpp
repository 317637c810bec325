// Shared by the Adam kernels of all instruction sets: the scalar set, and the table of the
// dispatcher. Included by kernels/adam*.cpp and adam_loops.hpp only.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/adam.hpp"
#include "kernels/narrow.hpp"

namespace memascend::adam {

/// A run of elements for one kernel, with one order of operations.
struct Block {
  const std::byte* gradient;
  std::byte* weight;
  std::byte* exp_avg;
  std::byte* exp_avg_sq;
  std::byte* output;
  std::size_t numel;
  // For stochastic rounding of moments: the step's random key, and the low 32 bits of the first
  // element's index.
  std::uint32_t key_low;
  std::uint32_t key_high;
  std::uint32_t first;
};

using Kernel = void (*)(const Block& block, const Coefficients& coefficients);

struct Kernels {
  Kernel body;
  Kernel tail;
};

/// The formats that a kernel is compiled for.
struct Formats {
  Format gradient;
  Format moment;                 // fp32 or bf16
  std::optional<Format> output;  // absent without 16-bit weights
  bool is_split;                 // the output is bf16 then
};

Kernels scalar_kernels(const Formats& formats);
#if defined(__x86_64__)
Kernels avx2_kernels(const Formats& formats);
Kernels avx512_kernels(const Formats& formats);
#endif

using kernels::Bfloat16;
using kernels::Float16;
using kernels::Float32;

struct NoOutput {};
/// The output in bf16, and with the low halves in the weight's place the weight itself.
struct Split {};

template <typename T>
T load_as(const std::byte* source) {
  T value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

/// A single lane in plain C++; a set of instructions as in adam_loops.hpp.
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
  static void store_rounded(std::byte* target, float value, Words addend) {
    const Bfloat16::Bits bits = Bfloat16::add_and_cut(value, addend);
    std::memcpy(target, &bits, sizeof(bits));
  }
  static float spread(float value) { return value; }
  static float mul(float left, float right) { return left * right; }
  static float div(float left, float right) { return left / right; }
  static float fma(float left, float right, float addend) { return std::fma(left, right, addend); }
  static float root(float value) { return std::sqrt(value); }

  static Words load_words16(const std::byte* source) { return load_as<std::uint16_t>(source); }
  static void store_words16(std::byte* target, Words words) {
    const auto bits = static_cast<std::uint16_t>(words);
    std::memcpy(target, &bits, sizeof(bits));
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
};

}  // namespace memascend::adam

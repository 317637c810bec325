// What every instruction set's kernels of the Adam step share: the number formats, the arithmetic
// of an element, and the table the dispatcher reads. Included by kernels/adam*.cpp only.
//
// `Set` is a number of lanes and its instructions:
//
//   Lanes, kWidth                  floats, and how many
//   load, store(address)           fp32
//   load<F>, store<F>(address)     a format, widened and rounded to nearest even
//   spread(float)                  the same in every lane
//   mul, div, fma, root            rounded once each
//
// None of it may be contracted by the compiler: the build says -ffp-contract=off.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/adam.hpp"

#if !defined(MA_TARGET)
#define MA_TARGET
#endif

namespace memascend::adam {

/// A run of elements for one kernel, which all have the same order of operations.
struct Block {
  const std::byte* gradient;
  std::byte* weight;
  std::byte* exp_avg;
  std::byte* exp_avg_sq;
  std::byte* output;
  std::size_t numel;
};

using Kernel = void (*)(const Block& block, const Coefficients& coefficients);

struct Kernels {
  Kernel body;
  Kernel tail;
};

/// `output` is absent where no 16-bit weights are wanted.
Kernels scalar_kernels(Format gradient, std::optional<Format> output);
#if defined(__x86_64__)
Kernels avx2_kernels(Format gradient, std::optional<Format> output);
Kernels avx512_kernels(Format gradient, std::optional<Format> output);
#endif

namespace {  // the attribute differs from file to file

struct Float32 {
  using Bits = std::uint32_t;
};
struct NoOutput {};

struct Bfloat16 {
  using Bits = std::uint16_t;
  static constexpr Bits kNan = 0x7fc0;
  static float widen(Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return kNan;
    return static_cast<Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct Float16 {
  using Bits = std::uint16_t;
  /// What separates the exponents' biases, where a float has its exponent.
  static constexpr std::uint32_t kBias = std::uint32_t{127 - 15} << 23;

  static float widen(Bits bits) {
    const std::uint32_t magnitude = bits & 0x7fff;
    const std::uint32_t sign = std::uint32_t{bits} >> 15 << 31;
    std::uint32_t wide = (magnitude << 13) + kBias;
    if (magnitude < 0x0400) {  // subnormal here, normal in a float
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
      // Below the smallest normal number: next to 0.5 a float's last place is that of the result.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      result = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000;
    } else {
      result = (magnitude - kBias + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    return static_cast<Bits>(sign | result);
  }
};

template <typename T>
T load_as(const std::byte* source) {
  T value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

/// One lane, in plain C++.
struct One {
  using Lanes = float;
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
  static float spread(float value) { return value; }
  static float mul(float left, float right) { return left * right; }
  static float div(float left, float right) { return left / right; }
  static float fma(float left, float right, float addend) { return std::fma(left, right, addend); }
  static float root(float value) { return std::sqrt(value); }
};

/// Coefficients in every lane.
template <typename Set>
struct Spread {
  using Lanes = typename Set::Lanes;

  MA_TARGET explicit Spread(const Coefficients& from)
      : factor(Set::spread(from.factor)),
        beta1(Set::spread(from.beta1)),
        beta2(Set::spread(from.beta2)),
        take1(Set::spread(from.take1)),
        take2(Set::spread(from.take2)),
        root_scale(Set::spread(from.root_scale)),
        epsilon(Set::spread(from.epsilon)),
        step_size(Set::spread(from.step_size)),
        gradient_decay(Set::spread(from.gradient_decay.value_or(0.0f))),
        weight_decay(Set::spread(from.weight_decay.value_or(0.0f))),
        decays_gradient(from.gradient_decay.has_value()),
        decays_weight(from.weight_decay.has_value()) {}

  Lanes factor;
  Lanes beta1;
  Lanes beta2;
  Lanes take1;
  Lanes take2;
  Lanes root_scale;
  Lanes epsilon;
  Lanes step_size;
  Lanes gradient_decay;
  Lanes weight_decay;
  bool decays_gradient;
  bool decays_weight;
};

/// Steps the lanes that begin at element `index`.
template <typename Set, typename G, typename O, bool kIsTail>
MA_TARGET inline void step_lanes(const Block& block, std::size_t index, const Spread<Set>& with) {
  using Lanes = typename Set::Lanes;
  const std::size_t offset = index * sizeof(float);
  Lanes gradient;
  if constexpr (sizeof(typename G::Bits) == sizeof(float)) {
    gradient = Set::load(block.gradient + offset);
  } else {
    gradient = Set::template load<G>(block.gradient + index * sizeof(typename G::Bits));
  }
  gradient = Set::mul(gradient, with.factor);
  Lanes weight = Set::load(block.weight + offset);
  if (with.decays_gradient) gradient = Set::fma(weight, with.gradient_decay, gradient);

  Lanes exp_avg = Set::load(block.exp_avg + offset);
  Lanes exp_avg_sq = Set::load(block.exp_avg_sq + offset);
  const Lanes square = Set::mul(gradient, gradient);
  if constexpr (kIsTail) {
    exp_avg = Set::fma(exp_avg, with.beta1, Set::mul(gradient, with.take1));
    exp_avg_sq = Set::fma(exp_avg_sq, with.beta2, Set::mul(square, with.take2));
  } else {
    exp_avg = Set::fma(gradient, with.take1, Set::mul(exp_avg, with.beta1));
    exp_avg_sq = Set::fma(square, with.take2, Set::mul(exp_avg_sq, with.beta2));
  }
  Set::store(block.exp_avg + offset, exp_avg);
  Set::store(block.exp_avg_sq + offset, exp_avg_sq);

  const Lanes divisor = Set::fma(Set::root(exp_avg_sq), with.root_scale, with.epsilon);
  if (with.decays_weight) weight = Set::fma(weight, with.weight_decay, weight);
  weight = Set::fma(Set::div(exp_avg, divisor), with.step_size, weight);
  Set::store(block.weight + offset, weight);
  if constexpr (!std::is_same_v<O, NoOutput>) {
    Set::template store<O>(block.output + index * sizeof(typename O::Bits), weight);
  }
}

/// The loops of a set: as many lanes at once as it has, then one by one.
template <typename Set>
struct Loops {
  template <typename G, typename O, bool kIsTail>
  MA_TARGET static void run(const Block& block, const Coefficients& coefficients) {
    const Spread<Set> with(coefficients);
    std::size_t index = 0;
    for (; index + Set::kWidth <= block.numel; index += Set::kWidth) {
      step_lanes<Set, G, O, kIsTail>(block, index, with);
    }
    const Spread<One> with_one(coefficients);
    for (; index < block.numel; ++index) step_lanes<One, G, O, kIsTail>(block, index, with_one);
  }

  template <typename G>
  static Kernels choose_output(std::optional<Format> output) {
    if (!output) return {run<G, NoOutput, false>, run<G, NoOutput, true>};
    if (*output == Format::kFloat16) return {run<G, Float16, false>, run<G, Float16, true>};
    return {run<G, Bfloat16, false>, run<G, Bfloat16, true>};
  }

  static Kernels choose(Format gradient, std::optional<Format> output) {
    switch (gradient) {
      case Format::kFloat16:
        return choose_output<Float16>(output);
      case Format::kBfloat16:
        return choose_output<Bfloat16>(output);
      case Format::kFloat32:
        break;
    }
    return choose_output<Float32>(output);
  }
};

}  // namespace
}  // namespace memascend::adam

// The arithmetic of the Adam step and the loops over it. The instructions come from `Set`:
//
//   Lanes, kWidth                  floats, and how many
//   load, store(address)           fp32
//   load<F>, store<F>(address)     a format, widened and rounded to nearest even
//   spread(float)                  the same in every lane
//   mul, div, fma, root            rounded once each
//
// Included by adam_scalar.cpp, adam_avx2.cpp and adam_avx512.cpp alone. Those with instructions of
// their own have defined MA_TARGET before: the attribute of every function that is to use them.
// Nothing here may be contracted by the compiler: the build says -ffp-contract=off.
#pragma once

#include <type_traits>

#include "kernels/adam_block.hpp"

#if !defined(MA_TARGET)
#define MA_TARGET
#endif

namespace memascend::adam {
namespace {  // the attribute differs from file to file

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

// The arithmetic of the Adam step and the loops over it. The instructions come from `Set`:
//
//   Lanes, kWidth                  floats, and their number
//   load, store(address)           fp32
//   load<F>, store<F>(address)     a format, widened or rounded to nearest even
//   spread(float)                  the same in every lane
//   mul, div, fma, root            each rounded once
//
//   Words                          as many 32-bit integers
//   words, count_from(integer)     the same in every lane; increasing by one per lane
//   bits, floats                   of Lanes as Words, and back
//   load_words16, store_words16(address)
//                                  16-bit integers
//   both, either, exclusive_or, add, subtract, multiply, cut_to_16, shift_left<count>,
//   shift_right<count>
//   store_rounded(address, Lanes, Words)
//                                  bf16, after adding words below 2^16 to the bits cut off
//
// Included by adam_scalar.cpp, adam_avx2.cpp and adam_avx512.cpp only. A file with instructions of
// its own defines MA_TARGET before: the attribute of every function that uses them. The compiler
// may not contract operations here: the build sets -ffp-contract=off.
#pragma once

#include <type_traits>

#include "kernels/adam_block.hpp"

#if !defined(MA_TARGET)
#define MA_TARGET
#endif
#include "kernels/adam_weight.hpp"

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

/// The finalizer of MurmurHash3 (fmix32, by Austin Appleby, in the public domain): every bit of the
/// result depends on every bit of the word.
template <typename Set>
MA_TARGET inline typename Set::Words mix(typename Set::Words word) {
  word = Set::exclusive_or(word, Set::template shift_right<16>(word));
  word = Set::multiply(word, Set::words(0x85ebca6bU));
  word = Set::exclusive_or(word, Set::template shift_right<13>(word));
  word = Set::multiply(word, Set::words(0xc2b2ae35U));
  return Set::exclusive_or(word, Set::template shift_right<16>(word));
}

/// Random bits for the lanes from element `index` on.
template <typename Set>
MA_TARGET inline typename Set::Words random_words(const Block& block, std::size_t index) {
  const auto number = static_cast<std::uint32_t>(block.first + index);
  const auto counted = Set::exclusive_or(Set::count_from(number), Set::words(block.key_low));
  return mix<Set>(Set::exclusive_or(mix<Set>(counted), Set::words(block.key_high)));
}

template <typename Set, typename F>
MA_TARGET inline typename Set::Lanes load_lanes(const std::byte* start, std::size_t index) {
  const std::byte* source = start + index * sizeof(typename F::Bits);
  if constexpr (sizeof(typename F::Bits) == sizeof(float)) {
    return Set::load(source);
  } else {
    return Set::template load<F>(source);
  }
}

/// Steps the lanes from element `index` on.
template <typename Set, typename G, typename M, typename O, bool kIsTail>
MA_TARGET inline void step_lanes(const Block& block, std::size_t index, const Spread<Set>& with) {
  using Lanes = typename Set::Lanes;
  constexpr bool kIsSplit = std::is_same_v<O, Split>;
  Lanes gradient = load_lanes<Set, G>(block.gradient, index);
  gradient = Set::mul(gradient, with.factor);
  Lanes exp_avg_sq = load_lanes<Set, M>(block.exp_avg_sq, index);
  Lanes weight = load_weight<Set, O>(block, index, exp_avg_sq);
  if constexpr (kIsSplit) exp_avg_sq = without_flags<Set>(exp_avg_sq);
  if (with.decays_gradient) gradient = Set::fma(weight, with.gradient_decay, gradient);

  Lanes exp_avg = load_lanes<Set, M>(block.exp_avg, index);
  const Lanes square = Set::mul(gradient, gradient);
  if constexpr (kIsTail) {
    exp_avg = Set::fma(exp_avg, with.beta1, Set::mul(gradient, with.take1));
    exp_avg_sq = Set::fma(exp_avg_sq, with.beta2, Set::mul(square, with.take2));
  } else {
    exp_avg = Set::fma(gradient, with.take1, Set::mul(exp_avg, with.beta1));
    exp_avg_sq = Set::fma(square, with.take2, Set::mul(exp_avg_sq, with.beta2));
  }
  const Lanes divisor = Set::fma(Set::root(exp_avg_sq), with.root_scale, with.epsilon);
  if (with.decays_weight) weight = Set::fma(weight, with.weight_decay, weight);
  weight = Set::fma(Set::div(exp_avg, divisor), with.step_size, weight);

  if constexpr (kIsSplit) exp_avg_sq = flagged<Set>(exp_avg_sq, weight);
  const std::size_t moment = index * sizeof(typename M::Bits);
  if constexpr (std::is_same_v<M, Float32>) {
    Set::store(block.exp_avg + moment, exp_avg);
    Set::store(block.exp_avg_sq + moment, exp_avg_sq);
  } else {
    const auto random = random_words<Set>(block, index);
    Set::store_rounded(block.exp_avg + moment, exp_avg, Set::cut_to_16(random));
    Set::store_rounded(block.exp_avg_sq + moment, exp_avg_sq,
                       Set::template shift_right<16>(random));
  }
  store_weight<Set, O>(block, index, weight);
}

/// The loops of a set: in steps of its lanes, then element by element.
template <typename Set>
struct Loops {
  template <typename G, typename M, typename O, bool kIsTail>
  MA_TARGET static void run(const Block& block, const Coefficients& coefficients) {
    const Spread<Set> with(coefficients);
    std::size_t index = 0;
    for (; index + Set::kWidth <= block.numel; index += Set::kWidth) {
      step_lanes<Set, G, M, O, kIsTail>(block, index, with);
    }
    const Spread<One> with_one(coefficients);
    for (; index < block.numel; ++index) step_lanes<One, G, M, O, kIsTail>(block, index, with_one);
  }

  template <typename G, typename M, typename O>
  static Kernels both() {
    return {run<G, M, O, false>, run<G, M, O, true>};
  }

  template <typename G, typename M>
  static Kernels choose_output(const Formats& formats) {
    if (formats.is_split) return both<G, M, Split>();
    if (!formats.output) return both<G, M, NoOutput>();
    if (*formats.output == Format::kFloat16) return both<G, M, Float16>();
    return both<G, M, Bfloat16>();
  }

  template <typename G>
  static Kernels choose_moment(const Formats& formats) {
    if (formats.moment == Format::kBfloat16) return choose_output<G, Bfloat16>(formats);
    return choose_output<G, Float32>(formats);
  }

  static Kernels choose(const Formats& formats) {
    switch (formats.gradient) {
      case Format::kFloat16:
        return choose_moment<Float16>(formats);
      case Format::kBfloat16:
        return choose_moment<Bfloat16>(formats);
      case Format::kFloat32:
        break;
    }
    return choose_moment<Float32>(formats);
  }
};

}  // namespace
}  // namespace memascend::adam

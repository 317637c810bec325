// The arithmetic of the Adam step. The instructions come from `Set`:
//
//   Lanes, kWidth                  floats, and their number
//   load, store(address)           fp32
//   load<F>, store<F>(address)     a format, widened or rounded to nearest even
//   spread(float)                  the same in every lane
//   mul, div, fma, root, plus, minus
//                                  each rounded once
//   least, floor                   of numbers from 0 to 2^31
//   plus_one_if_less(value, left, right)
//
//   Words                          as many 32-bit integers
//   words, count_from(integer)     the same in every lane; increasing by one per lane
//   bits, floats                   of Lanes as Words, and back
//   convert, integers              to floats by value, and back: cut towards zero
//   load_words8, load_signed8, store_words8, load_words16, store_words16(address)
//                                  8-bit and 16-bit integers
//   to_bfloat16(Lanes[, Words])    bf16 as integers, rounded to nearest even, or after adding words
//                                  below 2^16 to the bits cut off
//   both, either, exclusive_or, add, subtract, multiply, least_of, greatest_of (signed), cut_to_16,
//   shift_left<count>, shift_right<count>, shift_right_signed<count>
//   greatest_lane(Words)           of words below 2^31
//
// Included by adam_loops.hpp and adam_codes.hpp only. A file with instructions of its own defines
// MA_TARGET before: the attribute of every function that uses them. The compiler may not contract
// operations here: the build sets -ffp-contract=off.
#pragma once

#include <type_traits>

#include "kernels/adam_block.hpp"
#include "kernels/adam_weight.hpp"
#include "kernels/random_words.hpp"

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

/// An element between the memory before the step and that behind it.
template <typename Set>
struct Element {
  typename Set::Lanes weight;
  typename Set::Lanes exp_avg;
  typename Set::Lanes exp_avg_sq;
  typename Set::Lanes root;  // of the new exp_avg_sq
};

template <typename Set, typename F>
MA_TARGET MA_INLINE typename Set::Lanes load_lanes(const std::byte* start, std::size_t index) {
  const std::byte* source = start + index * sizeof(typename F::Bits);
  if constexpr (sizeof(typename F::Bits) == sizeof(float)) {
    return Set::load(source);
  } else {
    return Set::template load<F>(source);
  }
}

/// Stores bf16, after adding words below 2^16 to the bits cut off.
template <typename Set>
MA_TARGET MA_INLINE void store_rounded(std::byte* target, typename Set::Lanes values,
                                       typename Set::Words addend) {
  Set::store_words16(target, Set::to_bfloat16(values, addend));
}

template <typename Set, bool kIsTail>
MA_TARGET MA_INLINE void step_element(typename Set::Lanes gradient, Element<Set>& element,
                                      const Spread<Set>& with) {
  using Lanes = typename Set::Lanes;
  Lanes& weight = element.weight;
  gradient = Set::mul(gradient, with.factor);
  if (with.decays_gradient) gradient = Set::fma(weight, with.gradient_decay, gradient);

  Lanes& exp_avg = element.exp_avg;
  Lanes& exp_avg_sq = element.exp_avg_sq;
  const Lanes square = Set::mul(gradient, gradient);
  if constexpr (kIsTail) {
    exp_avg = Set::fma(exp_avg, with.beta1, Set::mul(gradient, with.take1));
    exp_avg_sq = Set::fma(exp_avg_sq, with.beta2, Set::mul(square, with.take2));
  } else {
    exp_avg = Set::fma(gradient, with.take1, Set::mul(exp_avg, with.beta1));
    exp_avg_sq = Set::fma(square, with.take2, Set::mul(exp_avg_sq, with.beta2));
  }
  element.root = Set::root(exp_avg_sq);
  const Lanes divisor = Set::fma(element.root, with.root_scale, with.epsilon);
  if (with.decays_weight) weight = Set::fma(weight, with.weight_decay, weight);
  weight = Set::fma(Set::div(exp_avg, divisor), with.step_size, weight);
}

/// The 8 bits by which a remainder is rounded: other ones than those of the moments, or bits of a
/// product that depend on all of them.
template <typename Set, typename M>
MA_TARGET MA_INLINE typename Set::Words remainder_bits(typename Set::Words random) {
  constexpr bool kTakesAll = std::is_same_v<M, Bfloat16> || std::is_same_v<M, FirstInCodes>;
  if constexpr (kTakesAll) random = Set::multiply(random, Set::words(0x9e3779b1U));
  return Set::template shift_right<24>(random);
}

}  // namespace
}  // namespace memascend::adam

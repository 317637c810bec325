// The loops of the Adam step over a block, for all formats; adam_codes.hpp has those of moments in
// codes. The instructions come from `Set`, as in adam_element.hpp. Included by adam_scalar.cpp,
// adam_avx2.cpp and adam_avx512.cpp only.
#pragma once

#include <type_traits>

#include "kernels/adam_codes.hpp"
#include "kernels/adam_element.hpp"

namespace memascend::adam {
namespace {  // the attribute differs from file to file

/// Steps the lanes from element `index` on.
template <typename Set, typename G, typename M, typename O, bool kIsTail>
MA_TARGET MA_INLINE void step_lanes(const Block& block, std::size_t index,
                                    const Spread<Set>& with) {
  constexpr bool kIsSplit = std::is_same_v<O, Split>;
  const std::size_t moment = index * sizeof(typename M::Bits);
  Element<Set> element;
  element.exp_avg_sq = load_lanes<Set, M>(block.exp_avg_sq, index);
  element.weight = load_weight<Set, O>(block, index, element.exp_avg_sq);
  if constexpr (kIsSplit) element.exp_avg_sq = without_flags<Set>(element.exp_avg_sq);
  element.exp_avg = load_lanes<Set, M>(block.exp_avg, index);
  step_element<Set, kIsTail>(load_lanes<Set, G>(block.gradient, index), element, with);
  if constexpr (kIsSplit) element.exp_avg_sq = flagged<Set>(element.exp_avg_sq, element.weight);

  const auto random = kernels::random_words<Set>(block.rounding, index);
  if constexpr (std::is_same_v<M, Float32>) {
    Set::store(block.exp_avg + moment, element.exp_avg);
    Set::store(block.exp_avg_sq + moment, element.exp_avg_sq);
  } else {
    store_rounded<Set>(block.exp_avg + moment, element.exp_avg, Set::cut_to_16(random));
    store_rounded<Set>(block.exp_avg_sq + moment, element.exp_avg_sq,
                       Set::template shift_right<16>(random));
  }
  store_weight<Set, O, true>(block, index, element.weight, remainder_bits<Set, M>(random));
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
    if constexpr (std::is_same_v<M, Codes> || std::is_same_v<M, FirstInCodes>) {
      return {run_codes<Set, G, M, O>, nullptr};
    } else {
      return {run<G, M, O, false>, run<G, M, O, true>};
    }
  }

  template <typename G, typename M>
  static Kernels choose_output(const Formats& formats) {
    if (formats.weights == Weights::kHalves) return both<G, M, Split>();
    if (formats.weights == Weights::kRemainders) return both<G, M, Remainder>();
    if (!formats.output) return both<G, M, NoOutput>();
    if (*formats.output == Format::kFloat16) return both<G, M, Float16>();
    return both<G, M, Bfloat16>();
  }

  template <typename G>
  static Kernels choose_moment(const Formats& formats) {
    switch (formats.moments) {
      case Moments::kBfloat16:
        return choose_output<G, Bfloat16>(formats);
      case Moments::kCodes:
        return choose_output<G, Codes>(formats);
      case Moments::kFirstInCodes:
        return choose_output<G, FirstInCodes>(formats);
      case Moments::kFloat32:
        break;
    }
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

// Where the Adam step has its weights: whole, or in halves with flags in the second moments. The
// instructions come from `Set`, as in adam_loops.hpp, which alone includes this.
#pragma once

#include <type_traits>

#include "kernels/adam_block.hpp"
#include "kernels/halves.hpp"

namespace memascend::adam {
namespace {  // the attribute differs from file to file

/// The weights of the lanes from element `index` on.
template <typename Set, typename O>
MA_TARGET inline typename Set::Lanes load_weight(const Block& block, std::size_t index,
                                                 typename Set::Lanes exp_avg_sq) {
  if constexpr (std::is_same_v<O, Split>) {
    const auto rounded = Set::load_words16(block.output + index * sizeof(Bfloat16::Bits));
    const auto low = Set::load_words16(block.weight + index * sizeof(Bfloat16::Bits));
    const auto is_tie = Set::template shift_right<31>(Set::bits(exp_avg_sq));
    const auto carry = Set::add(Set::add(low, is_tie), Set::words(halves::kHalfLess));
    const auto high = Set::subtract(rounded, Set::template shift_right<16>(carry));
    return Set::floats(Set::either(Set::template shift_left<16>(high), low));
  } else {
    return Set::load(block.weight + index * sizeof(float));
  }
}

template <typename Set, typename O>
MA_TARGET inline void store_weight(const Block& block, std::size_t index,
                                   typename Set::Lanes weight) {
  if constexpr (std::is_same_v<O, Split>) {
    const std::size_t narrow = index * sizeof(Bfloat16::Bits);
    Set::store_words16(block.weight + narrow, Set::cut_to_16(Set::bits(weight)));
    Set::template store<Bfloat16>(block.output + narrow, weight);
  } else {
    Set::store(block.weight + index * sizeof(float), weight);
    if constexpr (!std::is_same_v<O, NoOutput>) {
      Set::template store<O>(block.output + index * sizeof(typename O::Bits), weight);
    }
  }
}

/// The second moments with the flags of the weights in their signs.
template <typename Set>
MA_TARGET inline typename Set::Lanes flagged(typename Set::Lanes exp_avg_sq,
                                             typename Set::Lanes weight) {
  const auto tail = Set::both(Set::bits(weight), Set::words(halves::kTieMask));
  // Below 2^17, and all ones if it was a tie.
  const auto distance =
      Set::subtract(Set::exclusive_or(tail, Set::words(halves::kTie)), Set::words(1));
  const auto magnitude = Set::both(Set::bits(exp_avg_sq), Set::words(halves::kMagnitude));
  return Set::floats(Set::either(magnitude, Set::both(distance, Set::words(halves::kSign))));
}

template <typename Set>
MA_TARGET inline typename Set::Lanes without_flags(typename Set::Lanes exp_avg_sq) {
  return Set::floats(Set::both(Set::bits(exp_avg_sq), Set::words(halves::kMagnitude)));
}

}  // namespace
}  // namespace memascend::adam

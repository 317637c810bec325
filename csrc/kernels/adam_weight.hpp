// Where the Adam step has its weights: whole, or in halves with flags in the second moments, or
// with a remainder. The instructions come from `Set`, as in adam_element.hpp, which alone includes
// this.
#pragma once

#include <type_traits>

#include "kernels/adam_block.hpp"
#include "kernels/halves.hpp"
#include "kernels/random_words.hpp"
#include "kernels/remainders.hpp"

namespace memascend::adam {
namespace {  // the attribute differs from file to file

/// The weights of the lanes from element `index` on. Only halves have flags, and second moments in
/// codes none.
template <typename Set, typename O>
MA_TARGET MA_INLINE typename Set::Lanes load_weight(const Block& block, std::size_t index,
                                                    typename Set::Lanes exp_avg_sq) {
  if constexpr (std::is_same_v<O, Split>) {
    const auto rounded = Set::load_words16(block.output + index * sizeof(Bfloat16::Bits));
    const auto low = Set::load_words16(block.weight + index * sizeof(Bfloat16::Bits));
    const auto is_tie = Set::template shift_right<31>(Set::bits(exp_avg_sq));
    const auto carry = Set::add(Set::add(low, is_tie), Set::words(halves::kHalfLess));
    const auto high = Set::subtract(rounded, Set::template shift_right<16>(carry));
    return Set::floats(Set::either(Set::template shift_left<16>(high), low));
  } else if constexpr (std::is_same_v<O, Remainder>) {
    const auto rounded = Set::load_words16(block.output + index * sizeof(Bfloat16::Bits));
    const auto remainder = Set::load_signed8(block.weight + index);
    return Set::floats(
        Set::add(Set::template shift_left<16>(rounded), Set::template shift_left<8>(remainder)));
  } else {
    return Set::load(block.weight + index * sizeof(float));
  }
}

/// All ones where the weight is a tie above an odd half, else below 2^17.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Words distance_to_tie(typename Set::Lanes weight) {
  const auto tail = Set::both(Set::bits(weight), Set::words(halves::kTieMask));
  return Set::subtract(Set::exclusive_or(tail, Set::words(halves::kTie)), Set::words(1));
}

/// `random` is for remainders, below 2^8. Without a flag a tie is stored as the next number.
template <typename Set, typename O, bool kHasFlag>
MA_TARGET MA_INLINE void store_weight(const Block& block, std::size_t index,
                                      typename Set::Lanes weight, typename Set::Words random) {
  const std::size_t narrow = index * sizeof(Bfloat16::Bits);
  if constexpr (std::is_same_v<O, Split>) {
    auto bits = Set::bits(weight);
    if constexpr (!kHasFlag) {
      bits = Set::add(bits, Set::template shift_right<31>(distance_to_tie<Set>(weight)));
    }
    Set::store_words16(block.weight + narrow, Set::cut_to_16(bits));
    Set::template store<Bfloat16>(block.output + narrow, weight);
  } else if constexpr (std::is_same_v<O, Remainder>) {
    const auto rounded = Set::to_bfloat16(weight);
    Set::store_words16(block.output + narrow, rounded);
    const auto beyond = Set::subtract(Set::bits(weight), Set::template shift_left<16>(rounded));
    const auto remainder = Set::template shift_right_signed<8>(Set::add(beyond, random));
    const auto not_above = Set::least_of(remainder, Set::words(remainders::kMost));
    Set::store_words8(block.weight + index,
                      Set::greatest_of(not_above, Set::words(0U - remainders::kMost)));
  } else {
    Set::store(block.weight + index * sizeof(float), weight);
    if constexpr (!std::is_same_v<O, NoOutput>) {
      Set::template store<O>(block.output + index * sizeof(typename O::Bits), weight);
    }
  }
}

/// The second moments with the flags of the weights in their signs.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Lanes flagged(typename Set::Lanes exp_avg_sq,
                                                typename Set::Lanes weight) {
  const auto flag = Set::both(distance_to_tie<Set>(weight), Set::words(halves::kSign));
  const auto magnitude = Set::both(Set::bits(exp_avg_sq), Set::words(halves::kMagnitude));
  return Set::floats(Set::either(magnitude, flag));
}

template <typename Set>
MA_TARGET MA_INLINE typename Set::Lanes without_flags(typename Set::Lanes exp_avg_sq) {
  return Set::floats(Set::both(Set::bits(exp_avg_sq), Set::words(halves::kMagnitude)));
}

}  // namespace
}  // namespace memascend::adam

// Random bits of an element, for stochastic rounding: they depend on a key and on the element's
// index alone. The instructions come from `Set`, as in adam_element.hpp. A file with instructions
// of its own defines MA_TARGET before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/rounding.hpp"

#if !defined(MA_TARGET)
#define MA_TARGET
#endif
/// A call in a loop over lanes costs more than what it calls.
#define MA_INLINE __attribute__((always_inline)) inline

namespace memascend::kernels {

namespace {  // the attribute differs from file to file

/// The finalizer of MurmurHash3 (fmix32, by Austin Appleby, in the public domain): every bit of the
/// result depends on every bit of the word.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Words mix(typename Set::Words word) {
  word = Set::exclusive_or(word, Set::template shift_right<16>(word));
  word = Set::multiply(word, Set::words(0x85ebca6bU));
  word = Set::exclusive_or(word, Set::template shift_right<13>(word));
  word = Set::multiply(word, Set::words(0xc2b2ae35U));
  return Set::exclusive_or(word, Set::template shift_right<16>(word));
}

/// Random bits for the lanes from element `index` on.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Words random_words(const Rounding& rounding, std::size_t index) {
  const auto number = static_cast<std::uint32_t>(rounding.first_index + index);
  const auto key_low = static_cast<std::uint32_t>(rounding.key);
  const auto key_high = static_cast<std::uint32_t>(rounding.key >> 32);
  const auto counted = Set::exclusive_or(Set::count_from(number), Set::words(key_low));
  return mix<Set>(Set::exclusive_or(mix<Set>(counted), Set::words(key_high)));
}

/// The number in (0, 1) that kRandomBits of random words stand for, from bit kShift on: (bits +
/// 1/2) / 2^kRandomBits.
inline constexpr int kRandomBits = 12;
template <typename Set, int kShift>
MA_TARGET MA_INLINE typename Set::Lanes unit(typename Set::Words random) {
  constexpr std::uint32_t kMask = (1U << kRandomBits) - 1;
  constexpr float kPlace = 1.0f / static_cast<float>(kMask + 1);
  const auto bits = Set::both(Set::template shift_right<kShift>(random), Set::words(kMask));
  return Set::fma(Set::convert(bits), Set::spread(kPlace), Set::spread(kPlace / 2));
}

}  // namespace
}  // namespace memascend::kernels

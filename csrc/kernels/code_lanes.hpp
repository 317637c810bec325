// Between moments and codes: what a step and the conversions share. The instructions come from
// `Set`, as in adam_element.hpp. A file with instructions of its own defines MA_TARGET before.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/codes.hpp"
#include "kernels/random_words.hpp"

namespace memascend::codes {

/// A scale for moments of this largest magnitude, given as its bits, and the scale's inverse.
struct Scale {
  float value = 0.0f;
  float inverse = 0.0f;

  Scale(std::uint32_t largest, float most, float least) {
    constexpr std::uint32_t kInfinity = 0x7f800000;
    if (largest >= kInfinity) {
      value = std::numeric_limits<float>::quiet_NaN();
    } else if (largest != 0) {
      // Divided: the largest decoded moment gives back the same scale.
      value = std::max(std::bit_cast<float>(largest) / most, least);
      inverse = 1.0f / value;
    }
  }
  bool is_nan() const { return value != value; }
};

inline Scale first_scale(std::uint32_t largest) {
  return Scale(largest, kFirstMost, kFirstScaleLeast);
}
/// `largest` is the root of the second moment.
inline Scale second_scale(std::uint32_t largest) {
  return Scale(largest, kSecondMost, kSecondScaleLeast);
}

namespace {  // the attribute differs from file to file

template <typename Set>
MA_TARGET MA_INLINE typename Set::Words magnitude(typename Set::Lanes values) {
  return Set::both(Set::bits(values), Set::words(0x7fffffff));
}

template <typename Set>
MA_TARGET MA_INLINE typename Set::Lanes first_of(typename Set::Words code,
                                                 typename Set::Lanes scale) {
  const auto number = Set::convert(code);
  return Set::mul(Set::mul(number, Set::floats(magnitude<Set>(number))), scale);
}

/// The root of the second moment.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Lanes second_root_of(typename Set::Words code,
                                                       typename Set::Lanes scale) {
  const auto number = Set::convert(code);
  return Set::mul(Set::mul(number, number), scale);
}

/// The code next to a first moment: of the two codes k and k + 1 around x = |value| * inverse it is
/// k + 1 if `unit`, in (0, 1), is below (x - k^2) / ((k + 1)^2 - k^2). Pre: x is finite.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Words first_code(typename Set::Lanes value,
                                                   typename Set::Lanes inverse,
                                                   typename Set::Lanes unit) {
  const auto x = Set::mul(Set::floats(magnitude<Set>(value)), inverse);
  const auto code = Set::least(Set::floor(Set::root(x)), Set::spread(126.0f));
  const auto gap = Set::fma(code, Set::spread(2.0f), Set::spread(1.0f));
  const auto beyond = Set::minus(x, Set::mul(code, code));
  const auto chosen = Set::plus_one_if_less(code, Set::mul(unit, gap), beyond);
  const auto sign = Set::both(Set::bits(value), Set::words(0x80000000));
  return Set::integers(Set::floats(Set::either(Set::bits(chosen), sign)));
}

/// The code next to the second moment whose root this is, by the same rule: x = (root * inverse)^2
/// lies between k^4 and (k + 1)^4. At least 1 if the root is above zero.
template <typename Set>
MA_TARGET MA_INLINE typename Set::Words second_code(typename Set::Lanes root,
                                                    typename Set::Lanes inverse,
                                                    typename Set::Lanes unit) {
  const auto two = Set::spread(2.0f);
  const auto x = Set::mul(root, inverse);
  const auto code = Set::least(Set::floor(Set::root(x)), Set::spread(254.0f));
  const auto square = Set::mul(code, code);
  // Differences of fourth powers as products: of squares' difference and sum.
  const auto step = Set::fma(code, two, Set::spread(1.0f));
  const auto gap = Set::mul(step, Set::fma(square, two, step));
  const auto beyond = Set::mul(Set::minus(x, square), Set::plus(x, square));
  const auto chosen = Set::plus_one_if_less(code, Set::mul(unit, gap), beyond);
  const auto least = Set::least_of(Set::bits(root), Set::words(1));
  return Set::greatest_of(Set::integers(chosen), least);
}

}  // namespace
}  // namespace memascend::codes

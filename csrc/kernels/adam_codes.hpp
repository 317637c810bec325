// The Adam step with moments in codes: the elements of one scale are stepped first, and their new
// moments wait in the first-level cache until the largest is known. The instructions come from
// `Set`, as in adam_element.hpp. Included by adam_loops.hpp only.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "kernels/adam_element.hpp"
#include "kernels/code_lanes.hpp"

namespace memascend::adam {
namespace {  // the attribute differs from file to file

/// Scales whose elements are stepped before any is rounded: a scale's inverse is computed
/// meanwhile.
inline constexpr std::size_t kTogether = 2;

/// Stepped elements of one scale, moments not yet rounded.
struct Draft {
  std::size_t first;  // in the block
  std::size_t numel;
  alignas(64) std::array<float, codes::kScaleNumel> exp_avg;
  alignas(64) std::array<float, codes::kScaleNumel> root;  // of second moments
  alignas(64) std::array<std::uint32_t, codes::kScaleNumel> random;
  // Bits of the largest of each.
  std::uint32_t exp_avg_most;
  std::uint32_t root_most;

  void begin(std::size_t new_first, std::size_t new_numel) {
    first = new_first;
    numel = new_numel;
    exp_avg_most = 0;
    root_most = 0;
  }
};

template <typename T>
std::byte* bytes_at(std::array<T, codes::kScaleNumel>& values, std::size_t index) {
  return reinterpret_cast<std::byte*>(values.data() + index);
}

/// Steps the draft's elements from `index` on, as long as there are enough for the set, and returns
/// the next one's index.
template <typename Set, typename G, typename M, typename O>
MA_TARGET MA_INLINE std::size_t draft_lanes(const Block& given, std::size_t index,
                                            const Spread<Set>& with, Draft& draft) {
  constexpr bool kIsSplit = std::is_same_v<O, Split>;
  constexpr bool kIsBoth = std::is_same_v<M, Codes>;
  const Block block = given;  // no store can change it
  const float* scales = block.scales + draft.first / codes::kScaleNumel * M::kScales;
  const auto exp_avg_scale = Set::spread(scales[0]);
  const auto root_scale = Set::spread(kIsBoth ? scales[M::kScales - 1] : 0.0f);
  auto exp_avg_most = Set::words(0);
  auto root_most = Set::words(0);
  for (; index + Set::kWidth <= draft.numel; index += Set::kWidth) {
    const std::size_t at = draft.first + index;
    Element<Set> element;
    if constexpr (kIsBoth) {
      const auto root =
          codes::second_root_of<Set>(Set::load_words8(block.exp_avg_sq + at), root_scale);
      element.exp_avg_sq = Set::mul(root, root);
    } else {
      element.exp_avg_sq = load_lanes<Set, Bfloat16>(block.exp_avg_sq, at);
    }
    element.weight = load_weight<Set, O>(block, at, element.exp_avg_sq);
    if constexpr (kIsSplit && !kIsBoth) {
      element.exp_avg_sq = without_flags<Set>(element.exp_avg_sq);
    }
    element.exp_avg = codes::first_of<Set>(Set::load_signed8(block.exp_avg + at), exp_avg_scale);
    step_element<Set, false>(load_lanes<Set, G>(block.gradient, at), element, with);

    const auto random = kernels::random_words<Set>(block.rounding, at);
    Set::store(bytes_at(draft.exp_avg, index), element.exp_avg);
    Set::store(bytes_at(draft.random, index), Set::floats(random));
    exp_avg_most = Set::greatest_of(exp_avg_most, codes::magnitude<Set>(element.exp_avg));
    if constexpr (kIsBoth) {
      Set::store(bytes_at(draft.root, index), element.root);
      root_most = Set::greatest_of(root_most, codes::magnitude<Set>(element.root));
    } else {
      if constexpr (kIsSplit) element.exp_avg_sq = flagged<Set>(element.exp_avg_sq, element.weight);
      store_rounded<Set>(block.exp_avg_sq + at * sizeof(Bfloat16::Bits), element.exp_avg_sq,
                         Set::template shift_right<16>(random));
    }
    store_weight<Set, O, !kIsBoth>(block, at, element.weight, remainder_bits<Set, M>(random));
  }
  draft.exp_avg_most = std::max(draft.exp_avg_most, Set::greatest_lane(exp_avg_most));
  draft.root_most = std::max(draft.root_most, Set::greatest_lane(root_most));
  return index;
}

/// Writes codes of first moments in the same way.
template <typename Set>
MA_TARGET MA_INLINE std::size_t code_first(std::byte* target, std::size_t index, float inverse,
                                           Draft& draft) {
  const auto spread = Set::spread(inverse);
  for (; index + Set::kWidth <= draft.numel; index += Set::kWidth) {
    const auto random = Set::bits(Set::load(bytes_at(draft.random, index)));
    const auto value = Set::load(bytes_at(draft.exp_avg, index));
    Set::store_words8(target + index,
                      codes::first_code<Set>(value, spread, kernels::unit<Set, 0>(random)));
  }
  return index;
}

/// The same of second moments.
template <typename Set>
MA_TARGET MA_INLINE std::size_t code_second(std::byte* target, std::size_t index, float inverse,
                                            Draft& draft) {
  const auto spread = Set::spread(inverse);
  for (; index + Set::kWidth <= draft.numel; index += Set::kWidth) {
    const auto random = Set::bits(Set::load(bytes_at(draft.random, index)));
    const auto root = Set::load(bytes_at(draft.root, index));
    Set::store_words8(
        target + index,
        codes::second_code<Set>(root, spread, kernels::unit<Set, kernels::kRandomBits>(random)));
  }
  return index;
}

/// Rounds moments to codes; where the scale is NaN they are zero.
template <typename Set, typename M>
MA_TARGET MA_INLINE void code_draft(const Block& block, Draft& draft) {
  float* scales = block.scales + draft.first / codes::kScaleNumel * M::kScales;
  const codes::Scale first = codes::first_scale(draft.exp_avg_most);
  scales[0] = first.value;
  std::byte* target = block.exp_avg + draft.first;
  if (first.is_nan()) {
    std::memset(target, 0, draft.numel);
  } else {
    const std::size_t done = code_first<Set>(target, 0, first.inverse, draft);
    code_first<One>(target, done, first.inverse, draft);
  }
  if constexpr (std::is_same_v<M, Codes>) {
    const codes::Scale second = codes::second_scale(draft.root_most);
    scales[1] = second.value;
    target = block.exp_avg_sq + draft.first;
    if (second.is_nan()) {
      std::memset(target, 0, draft.numel);
    } else {
      const std::size_t done = code_second<Set>(target, 0, second.inverse, draft);
      code_second<One>(target, done, second.inverse, draft);
    }
  }
}

/// The loop over a block; its first element is the first of a scale.
template <typename Set, typename G, typename M, typename O>
MA_TARGET void run_codes(const Block& block, const Coefficients& coefficients) {
  const Spread<Set> with(coefficients);
  const Spread<One> with_one(coefficients);
  std::array<Draft, kTogether> drafts;
  for (std::size_t first = 0; first < block.numel;) {
    std::size_t count = 0;
    for (; count < kTogether && first < block.numel; ++count) {
      Draft& draft = drafts[count];
      draft.begin(first, std::min(codes::kScaleNumel, block.numel - first));
      const std::size_t done = draft_lanes<Set, G, M, O>(block, 0, with, draft);
      draft_lanes<One, G, M, O>(block, done, with_one, draft);
      first += draft.numel;
    }
    for (std::size_t i = 0; i < count; ++i) code_draft<Set, M>(block, drafts[i]);
  }
}

}  // namespace
}  // namespace memascend::adam

// sources: csrc/kernels/halves.cpp
//
// Weights in two halves on memory whose exact bounds a sanitizer watches, at every length around
// the compiler's vectors.
#include "kernels/halves.hpp"

#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "support/expect.hpp"

namespace {

using namespace memascend;
using kernels::Format;

bool is_nan(std::uint32_t weight) { return (weight & halves::kMagnitude) > 0x7f800000; }

/// Every third is a tie, half of them above an odd number.
std::vector<std::uint32_t> weights_of(std::size_t numel) {
  std::mt19937 random(static_cast<unsigned>(numel));
  std::vector<std::uint32_t> weights(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    weights[i] = static_cast<std::uint32_t>(random());
    if (i % 3 == 0) weights[i] = (weights[i] & 0xffff0000U) | 0x8000U;
  }
  return weights;
}

template <typename Bits>
void test_every_length(Format format) {
  for (std::size_t numel = 0; numel < 70; ++numel) {
    const std::vector<std::uint32_t> weights = weights_of(numel);
    std::vector<std::uint16_t> high(numel);
    std::vector<std::uint16_t> low(numel);
    std::vector<Bits> flags(numel, 0x1234);
    std::vector<std::uint32_t> joined(numel);
    halves::cut(weights.data(), high.data(), low.data(), numel);
    halves::join(high.data(), low.data(), nullptr, Format::kFloat32, joined.data(), numel);
    EXPECT(joined == weights);
    halves::round_high(high.data(), low.data(), flags.data(), format, numel);
    if (numel != 0) {  // null is no flags
      halves::join(high.data(), low.data(), flags.data(), format, joined.data(), numel);
    }
    for (std::size_t i = 0; i < numel; ++i) {
      EXPECT(is_nan(weights[i]) ? is_nan(joined[i]) : joined[i] == weights[i]);
    }
    halves::clear_flags(flags.data(), format, numel);
    EXPECT(flags == std::vector<Bits>(numel, 0x1234));
  }
}

/// A tie above an odd half is the next number, and that rounds to the same.
void test_halves_without_flags() {
  const std::vector<std::uint32_t> weights = weights_of(1000);
  std::vector<std::uint16_t> high(weights.size());
  std::vector<std::uint16_t> low(weights.size());
  std::vector<std::uint16_t> exact_high(weights.size());
  std::vector<std::uint32_t> joined(weights.size());
  std::vector<std::uint32_t> flags(weights.size());
  halves::cut(weights.data(), high.data(), low.data(), weights.size());
  exact_high = high;
  const std::vector<std::uint16_t> exact_low = low;
  halves::round_high_without_flags(high.data(), low.data(), weights.size());
  halves::join_without_flags(high.data(), low.data(), joined.data(), weights.size());
  halves::round_high(exact_high.data(), exact_low.data(), flags.data(), Format::kFloat32,
                     weights.size());
  EXPECT(high == exact_high);
  std::size_t moved = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const bool is_tie = (weights[i] & halves::kTieMask) == halves::kTie;
    if (is_nan(weights[i])) {
      EXPECT(is_nan(joined[i]));
    } else {
      EXPECT(joined[i] == weights[i] + (is_tie ? 1 : 0));
      moved += is_tie ? 1 : 0;
    }
  }
  EXPECT(moved > 100);
}

/// Flags are bits of their own, and joining may begin at any of them.
void test_bits() {
  for (std::size_t numel = 0; numel < 70; ++numel) {
    const std::vector<std::uint32_t> weights = weights_of(numel);
    std::vector<std::uint16_t> rounded(numel);
    std::vector<std::uint16_t> low(numel);
    std::vector<std::uint16_t> high(numel);
    std::vector<std::uint32_t> flags(numel);
    std::vector<std::uint8_t> bits((numel + 7) / 8, 0xff);
    halves::cut_with_bits(weights.data(), rounded.data(), low.data(), bits.data(), numel);
    halves::cut(weights.data(), high.data(), low.data(), numel);
    halves::round_high(high.data(), low.data(), flags.data(), Format::kFloat32, numel);
    EXPECT(rounded == high);
    for (std::size_t i = 0; i < 8 * bits.size(); ++i) {
      const bool is_set = (bits[i / 8] >> i % 8 & 1) != 0;
      EXPECT(is_set == (i < numel && (weights[i] & halves::kTieMask) == halves::kTie));
    }
    for (std::size_t first = 0; first <= numel; ++first) {
      std::vector<std::uint32_t> joined(numel - first);
      halves::join_with_bits(rounded.data() + first, low.data() + first, bits.data(), first,
                             joined.data(), numel - first);
      for (std::size_t i = first; i < numel; ++i) {
        EXPECT(is_nan(weights[i]) ? is_nan(joined[i - first]) : joined[i - first] == weights[i]);
      }
    }
  }
}

void test_flags_are_of_two_formats() {
  std::uint16_t flag = 0;
  bool is_refused = false;
  try {
    halves::clear_flags(&flag, Format::kFloat16, 1);
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  EXPECT(is_refused);
}

}  // namespace

int main() {
  test_every_length<std::uint32_t>(Format::kFloat32);
  test_every_length<std::uint16_t>(Format::kBfloat16);
  test_halves_without_flags();
  test_bits();
  test_flags_are_of_two_formats();
  return 0;
}

// sources: csrc/kernels/remainders.cpp
//
// Weights of 24 bits: every pair of a bf16 number and a remainder, and what weights become.
#include "kernels/remainders.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "support/expect.hpp"

namespace {

using namespace memascend;
using kernels::Rounding;

/// All 65536 numbers with all 255 remainders, as fp32 and back: none is lost, but of a NaN only
/// that it is one. Where infinity has a remainder above zero it is a NaN.
void test_every_pair_comes_back(const std::optional<Rounding>& rounding) {
  constexpr std::size_t kNumbers = 65536;
  std::vector<std::uint16_t> rounded(kNumbers);
  std::vector<std::int8_t> remainders(kNumbers);
  std::vector<float> weights(kNumbers);
  for (int remainder = -127; remainder <= 127; ++remainder) {
    std::vector<std::uint16_t> given(kNumbers);
    for (std::size_t i = 0; i < kNumbers; ++i) given[i] = static_cast<std::uint16_t>(i);
    const std::vector<std::int8_t> given_remainders(kNumbers, static_cast<std::int8_t>(remainder));
    remainders::join(given.data(), given_remainders.data(), weights.data(), kNumbers);
    remainders::cut(weights.data(), rounded.data(), remainders.data(), kNumbers, rounding);
    for (std::size_t i = 0; i < kNumbers; ++i) {
      const unsigned magnitude = given[i] & 0x7fff;
      if (magnitude > 0x7f80) EXPECT(std::isnan(weights[i]) || magnitude == 0x7f81);
      if (std::isnan(weights[i])) {
        EXPECT((rounded[i] & 0x7fff) > 0x7f80);
        continue;
      }
      // No weight below zero in magnitude: there a remainder would borrow of the sign.
      if (magnitude == 0 && remainder < 0) continue;
      if (magnitude > 0x7f80) continue;
      EXPECT(rounded[i] == given[i]);
      EXPECT(remainders[i] == remainder);
    }
  }
}

void test_weights_are_off_by_less_than_a_place() {
  std::mt19937 random(3);
  const std::size_t numel = 100'000;
  std::vector<float> weights(numel);
  std::vector<float> joined(numel);
  for (float& weight : weights) {
    const auto bits = static_cast<std::uint32_t>(random());
    weight = std::bit_cast<float>((bits & 0x80ffffffU) | 0x3d000000U);
  }
  std::vector<std::uint16_t> rounded(numel);
  std::vector<std::int8_t> remainders(numel);
  for (const bool is_nearest : {true, false}) {
    std::optional<Rounding> rounding;
    if (!is_nearest) rounding = Rounding{.key = 9, .first_index = 77};
    remainders::cut(weights.data(), rounded.data(), remainders.data(), numel, rounding);
    remainders::join(rounded.data(), remainders.data(), joined.data(), numel);
    for (std::size_t i = 0; i < numel; ++i) {
      const auto was = static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(weights[i]));
      const auto is = static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(joined[i]));
      // Two next to the middle of two bf16 numbers, where remainders end.
      const bool is_end = remainders[i] == 127 || remainders[i] == -127;
      EXPECT(std::abs(was - is) <= (is_nearest && !is_end ? 128 : 256));
    }
  }
}

}  // namespace

int main() {
  test_every_pair_comes_back({});
  for (std::uint64_t key = 0; key < 3; ++key) {
    test_every_pair_comes_back(Rounding{.key = key, .first_index = 0});
  }
  test_weights_are_off_by_less_than_a_place();
  return 0;
}

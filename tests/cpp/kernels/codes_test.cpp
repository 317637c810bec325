// sources: csrc/kernels/codes.cpp
//
// Moments to codes and back on memory whose exact bounds a sanitizer watches, with scales side by
// side or alone, at lengths around the end of a scale.
#include "kernels/codes.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "support/expect.hpp"

namespace {

using namespace memascend;
using codes::Rounding;
using codes::Scales;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> values_of(std::size_t numel) {
  std::mt19937 random(static_cast<unsigned>(numel));
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

void test_values_that_were_decoded_keep_their_codes(std::size_t numel, std::size_t stride) {
  const std::vector<float> values = values_of(numel);
  std::vector<float> squares;
  for (const float value : values) squares.push_back(value * value);
  const std::size_t count = (numel + codes::kScaleNumel - 1) / codes::kScaleNumel;
  const std::size_t floats = count == 0 ? 0 : (count - 1) * stride + 1;
  std::vector<float> scales(floats);
  std::vector<float> again(floats);
  std::vector<float> decoded(numel);
  const Scales target{scales.data(), stride};
  const Rounding rounding{.key = 5, .first_index = 128};
  for (const std::optional<Rounding>& with : {std::optional<Rounding>{}, std::optional{rounding}}) {
    std::vector<std::int8_t> first(numel);
    std::vector<std::int8_t> first_again(numel);
    codes::encode_first(values.data(), first.data(), target, numel, with);
    codes::decode_first(first.data(), target, decoded.data(), numel);
    for (std::size_t i = 0; i < numel; ++i) {
      EXPECT(first[i] >= -127);
      EXPECT(decoded[i] == 0.0f || std::signbit(decoded[i]) == std::signbit(values[i]));
    }
    codes::encode_first(decoded.data(), first_again.data(), {again.data(), stride}, numel, with);
    EXPECT(first == first_again);

    std::vector<std::uint8_t> second(numel);
    std::vector<std::uint8_t> second_again(numel);
    codes::encode_second(squares.data(), second.data(), target, numel, with);
    codes::decode_second(second.data(), target, decoded.data(), numel);
    for (std::size_t i = 0; i < numel; ++i) EXPECT((decoded[i] > 0.0f) == (squares[i] > 0.0f));
    codes::encode_second(decoded.data(), second_again.data(), {again.data(), stride}, numel, with);
    EXPECT(second == second_again);
  }
}

/// The largest, the smallest, none, and those that take the whole scale with them.
void test_values_at_the_ends() {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float large = 1e38f;
  for (const float value : {0.0f, tiny, 1e-38f, 1e-30f, 1.0f, large, kInfinity, -kInfinity, NAN}) {
    std::vector<float> values(3, 0.0f);
    values[1] = value;
    float scale = -1.0f;
    std::vector<std::int8_t> first(3);
    codes::encode_first(values.data(), first.data(), {&scale, 1}, 3, {});
    EXPECT(std::isnan(scale) == !std::isfinite(value));
    EXPECT((scale == 0.0f) == (value == 0.0f));
    EXPECT(first[1] == (value >= 1e-30f && value <= large ? 127 : 0));
    std::vector<std::uint8_t> second(3);
    codes::encode_second(values.data(), second.data(), {&scale, 1}, 3, {});
    EXPECT(std::isnan(scale) == !std::isfinite(value));
    EXPECT((scale == 0.0f) == (value == 0.0f));
    EXPECT((second[1] != 0) == (value > 0.0f && value <= large));
    EXPECT(second[0] == 0);
  }
  const float negative = -1.0f;
  float scale = 0.0f;
  std::uint8_t code = 9;
  codes::encode_second(&negative, &code, {&scale, 1}, 1, {});
  EXPECT(std::isnan(scale));
  EXPECT(code == 0);
}

}  // namespace

int main() {
  for (const std::size_t numel : {0U, 1U, 7U, 127U, 128U, 129U, 300U}) {
    for (const std::size_t stride : {1U, 2U}) {
      test_values_that_were_decoded_keep_their_codes(numel, stride);
    }
  }
  test_values_at_the_ends();
  return 0;
}

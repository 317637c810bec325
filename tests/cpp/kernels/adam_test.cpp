// sources: csrc/kernels/adam*.cpp csrc/kernels/isa.cpp csrc/kernels/threads.cpp
//
// The Adam step with every kernel of this CPU, at every length and offset around its loop, on
// memory whose exact bounds a sanitizer watches; all of them give the scalar kernel's bits.
#include "kernels/adam.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels/codes.hpp"
#include "kernels/threads.hpp"
#include "support/expect.hpp"

namespace {

using namespace memascend;
using adam::Coefficients;
using adam::Moments;
using adam::Weights;
using kernels::Format;
using kernels::Isa;

constexpr Format kFormats[] = {Format::kFloat32, Format::kFloat16, Format::kBfloat16};
constexpr Moments kMoments[] = {Moments::kFloat32, Moments::kBfloat16, Moments::kCodes,
                                Moments::kFirstInCodes};
constexpr Weights kNotWhole[] = {Weights::kHalves, Weights::kRemainders};
constexpr std::optional<Format> kOutputs[] = {std::nullopt, Format::kFloat16, Format::kBfloat16};

Coefficients coefficients(int kind) {
  Coefficients made{.factor = 1.0f / 3.0f,
                    .beta1 = 0.9f,
                    .beta2 = 0.999f,
                    .take1 = 1.0f - 0.9f,
                    .take2 = 1.0f - 0.999f,
                    .root_scale = 1.7f,
                    .epsilon = 1e-8f,
                    .step_size = -1e-2f,
                    .gradient_decay = {},
                    .weight_decay = {}};
  if (kind == 1) made.gradient_decay = 0.1f;
  if (kind == 2) made.weight_decay = -1e-3f;
  return made;
}

struct Formats {
  Format gradient;
  Moments moments;
  std::optional<Format> output;
  Weights weights;

  std::size_t scales() const {
    if (moments == Moments::kCodes) return 2;
    return moments == Moments::kFirstInCodes ? 1 : 0;
  }
};

/// Memory of a tile that ends exactly where its elements end.
class Tile {
 public:
  Tile(std::size_t numel, const Formats& formats, std::size_t offset, unsigned seed)
      : numel_(numel), formats_(formats), offset_(offset) {
    std::mt19937 random(seed);
    const auto fill = [&](std::size_t width, bool any_bits) {
      std::vector<std::byte> memory(offset + numel * width);
      for (std::size_t index = 0; index < numel; ++index) {
        std::uint32_t bits = static_cast<std::uint32_t>(random());
        // Of numbers of usual size only sign and fraction are random.
        if (!any_bits && width > 1) bits = (bits & 0x807fffffU) | 0x3f000000U;
        if (width == sizeof(std::uint16_t)) bits >>= 16;
        std::memcpy(memory.data() + offset + index * width, &bits, width);
      }
      return memory;
    };
    const bool any_bits = seed % 2 != 0;
    gradient_ = fill(kernels::element_bytes(formats.gradient), any_bits);
    for (std::size_t part = 0; part < 3; ++part) wide_[part] = fill(width_of(part), any_bits);
    if (formats.output) output_ = fill(kernels::element_bytes(*formats.output), any_bits);
    const std::size_t kept = (numel + codes::kScaleNumel - 1) / codes::kScaleNumel;
    for (std::size_t index = 0; index < kept * formats.scales(); ++index) {
      const auto bits = static_cast<std::uint32_t>(random());
      scales_.push_back(any_bits ? std::bit_cast<float>(bits) : 1e-4f);
    }
  }

  void step(const Coefficients& with, Isa isa, const adam::Options& options) {
    adam::update({.gradient = gradient_.data() + offset_,
                  .gradient_format = formats_.gradient,
                  .weight = wide_[0].data() + offset_,
                  .weights = formats_.weights,
                  .exp_avg = wide_[1].data() + offset_,
                  .exp_avg_sq = wide_[2].data() + offset_,
                  .moments = formats_.moments,
                  .scales = scales_.data(),
                  .output = output_.data() + offset_,
                  .output_format = formats_.output,
                  .numel = numel_},
                 with, isa, options);
  }

  float value(std::size_t part, std::size_t index) const {
    std::uint32_t bits = 0;
    const std::size_t width = width_of(part);
    std::memcpy(&bits, wide_[part].data() + offset_ + index * width, width);
    return std::bit_cast<float>(width == sizeof(std::uint16_t) ? bits << 16 : bits);
  }

  std::uint16_t output(std::size_t index) const {
    std::uint16_t bits = 0;
    std::memcpy(&bits, output_.data() + offset_ + index * sizeof(bits), sizeof(bits));
    return bits;
  }

  bool has_nan_output(std::size_t index) const {
    if (!formats_.output) return false;
    return (output(index) & 0x7fff) > (*formats_.output == Format::kFloat16 ? 0x7c00 : 0x7f80);
  }

  /// Bits are equal; of a NaN only that it is one, whose remainder may differ.
  void expect_equal(const Tile& other) const {
    for (std::size_t index = 0; index < numel_; ++index) {
      const bool both_nan = has_nan_output(index) && other.has_nan_output(index);
      for (std::size_t part = 0; part < 3; ++part) {
        if (part == 0 && both_nan && formats_.weights != Weights::kWhole) continue;
        expect_same(value(part, index), other.value(part, index));
      }
      if (!formats_.output) continue;
      EXPECT(both_nan || output(index) == other.output(index));
      if (formats_.weights == Weights::kWhole) EXPECT(both_nan == std::isnan(value(0, index)));
    }
    for (std::size_t i = 0; i < scales_.size(); ++i) expect_same(scales_[i], other.scales_[i]);
  }

 private:
  static void expect_same(float left, float right) {
    EXPECT((std::isnan(left) && std::isnan(right)) ||
           std::bit_cast<std::uint32_t>(left) == std::bit_cast<std::uint32_t>(right));
  }

  /// Of weights, and of both moments.
  std::size_t width_of(std::size_t part) const {
    if (part == 0) {
      if (formats_.weights == Weights::kRemainders) return 1;
      return formats_.weights == Weights::kHalves ? 2 : 4;
    }
    if (formats_.moments == Moments::kFloat32) return 4;
    const bool is_code = formats_.scales() == 2 || (formats_.scales() == 1 && part == 1);
    return is_code ? 1 : 2;
  }

  std::size_t numel_;
  Formats formats_;
  std::size_t offset_;
  std::vector<std::byte> gradient_;
  std::vector<std::byte> wide_[3];
  std::vector<std::byte> output_;
  std::vector<float> scales_;
};

/// All around the vectors of every set, and around the ends of scales where there are some.
std::vector<std::size_t> lengths_of(const Formats& formats) {
  std::vector<std::size_t> lengths;
  for (std::size_t numel = 0; numel < 70; ++numel) lengths.push_back(numel);
  if (formats.scales() == 0) return lengths;
  for (std::size_t scales = 1; scales < 4; ++scales) {
    for (const int more : {-17, -1, 0, 1, 15, 33}) {
      lengths.push_back(scales * codes::kScaleNumel + static_cast<std::size_t>(more));
    }
  }
  return lengths;
}

void test_every_length_gives_the_scalar_bits(Isa isa, const Formats& formats) {
  for (const std::size_t numel : lengths_of(formats)) {
    const std::size_t offset = numel % 5;
    const auto seed = static_cast<unsigned>(numel);
    Tile ours(numel, formats, offset, seed);
    Tile expected(numel, formats, 0, seed);
    for (int round = 0; round < 3; ++round) {
      const Coefficients with = coefficients((static_cast<int>(numel) + round) % 3);
      const adam::Options options{
          .tail_numel = formats.scales() == 0 ? numel % 8 : 0,
          .threads = 1,
          .rounding = {.key = numel * 0x9e3779b97f4a7c15U, .first_index = 0xffffff80U}};
      ours.step(with, isa, options);
      expected.step(with, Isa::kScalar, options);
    }
    ours.expect_equal(expected);
  }
}

void test_every_kernel_gives_the_scalar_bits(Isa isa) {
  for (const Format gradient : kFormats) {
    for (const Moments moments : kMoments) {
      for (const std::optional<Format> output : kOutputs) {
        test_every_length_gives_the_scalar_bits(isa, {gradient, moments, output, Weights::kWhole});
      }
      for (const Weights weights : kNotWhole) {
        test_every_length_gives_the_scalar_bits(isa,
                                                {gradient, moments, Format::kBfloat16, weights});
      }
    }
  }
}

/// Each operation rounded on its own or fused, in doubles, which hold a product of floats exactly.
void test_one_element_by_hand() {
  const Coefficients with = coefficients(2);
  const Formats wide{Format::kFloat32, Moments::kFloat32, std::nullopt, Weights::kWhole};
  for (const bool is_tail : {false, true}) {
    Tile tile(1, wide, 0, 2);
    float gradient = 1.0f;
    float weight = tile.value(0, 0);
    float exp_avg = tile.value(1, 0);
    float exp_avg_sq = std::fabs(tile.value(2, 0));
    const std::size_t tail_numel = is_tail ? 1 : 0;
    adam::update({.gradient = &gradient,
                  .gradient_format = Format::kFloat32,
                  .weight = &weight,
                  .exp_avg = &exp_avg,
                  .exp_avg_sq = &exp_avg_sq,
                  .moments = Moments::kFloat32,
                  .output = nullptr,
                  .output_format = {},
                  .numel = 1},
                 with, Isa::kScalar, {.tail_numel = tail_numel, .threads = 1, .rounding = {}});
    const float multiplied = with.factor;
    const float square = multiplied * multiplied;
    const float old1 = tile.value(1, 0);
    const float old2 = std::fabs(tile.value(2, 0));
    const float first = is_tail ? std::fma(old1, with.beta1, multiplied * with.take1)
                                : std::fma(multiplied, with.take1, old1 * with.beta1);
    const float second = is_tail ? std::fma(old2, with.beta2, square * with.take2)
                                 : std::fma(square, with.take2, old2 * with.beta2);
    EXPECT(exp_avg == first);
    EXPECT(exp_avg_sq == second);
    const float divisor = std::fma(std::sqrt(second), with.root_scale, with.epsilon);
    const float old = tile.value(0, 0);
    const float decayed = std::fma(old, *with.weight_decay, old);
    EXPECT(weight == std::fma(first / divisor, with.step_size, decayed));
    EXPECT(gradient == 1.0f);
  }
}

void test_threads_share_all_blocks_once(Isa isa, Moments moments, Weights weights) {
  const Formats formats{Format::kBfloat16, moments, Format::kBfloat16, weights};
  const std::size_t numel = 5 * adam::kBlockNumel + 13;
  for (const std::size_t tail_numel : {std::size_t{0}, std::size_t{5}, numel}) {
    if (formats.scales() != 0 && tail_numel != 0) continue;
    adam::Options options{
        .tail_numel = tail_numel, .threads = 1, .rounding = {.key = 77, .first_index = 1024}};
    Tile expected(numel, formats, 0, 4);
    expected.step(coefficients(1), isa, options);
    for (const std::size_t threads : {0U, 2U, 7U}) {
      Tile ours(numel, formats, 1, 4);
      options.threads = threads;
      ours.step(coefficients(1), isa, options);
      ours.expect_equal(expected);
    }
  }
}

template <typename Call>
void expect_refused(Call call) {
  bool is_refused = false;
  try {
    call();
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  EXPECT(is_refused);
}

void test_mistakes_are_refused_and_change_nothing() {
  float value[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  const auto step = [&](adam::Operands operands, adam::Options options) {
    adam::update(operands, coefficients(0), Isa::kScalar, options);
  };
  const adam::Operands good{.gradient = &value[0],
                            .gradient_format = Format::kFloat32,
                            .weight = &value[1],
                            .exp_avg = &value[2],
                            .exp_avg_sq = &value[3],
                            .moments = Moments::kFloat32,
                            .output = nullptr,
                            .output_format = {},
                            .numel = 1};
  adam::Operands bad = good;
  bad.weight = nullptr;
  expect_refused([&] { step(bad, {}); });
  bad = good;
  bad.output_format = Format::kBfloat16;
  expect_refused([&] { step(bad, {}); });
  bad = good;
  bad.output = &value[0];
  bad.output_format = Format::kFloat32;
  expect_refused([&] { step(bad, {}); });
  for (const Weights weights : kNotWhole) {
    bad.weights = weights;
    bad.output_format = Format::kFloat16;
    expect_refused([&] { step(bad, {}); });
    bad.output_format = {};
    expect_refused([&] { step(bad, {}); });
  }
  bad = good;
  bad.moments = Moments::kCodes;
  expect_refused([&] { step(bad, {}); });  // no scales
  float scales[2] = {};
  bad.scales = scales;
  expect_refused([&] { step(bad, {.tail_numel = 1, .threads = 1, .rounding = {}}); });
  expect_refused([&] {
    step(bad, {.tail_numel = 0, .threads = 1, .rounding = {.key = 0, .first_index = 64}});
  });
  bad = good;
  bad.numel = std::numeric_limits<std::size_t>::max();
  expect_refused([&] { step(bad, {}); });
  adam::Options options{.tail_numel = 2, .threads = 1, .rounding = {}};
  expect_refused([&] { step(good, options); });
  options = {.tail_numel = 0, .threads = kernels::kThreadsMax + 1, .rounding = {}};
  expect_refused([&] { step(good, options); });
  EXPECT(value[1] == 1.0f);
  step({}, {});  // no elements at no address
}

}  // namespace

int main() {
  for (const Isa isa : kernels::available_isas()) {
    test_every_kernel_gives_the_scalar_bits(isa);
    for (const Moments moments : kMoments) {
      for (const Weights weights : {Weights::kWhole, Weights::kHalves, Weights::kRemainders}) {
        test_threads_share_all_blocks_once(isa, moments, weights);
      }
    }
  }
  test_one_element_by_hand();
  test_mistakes_are_refused_and_change_nothing();
  return 0;
}

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

#include "kernels/threads.hpp"
#include "support/expect.hpp"

namespace {

using namespace memascend;
using adam::Coefficients;
using kernels::Format;
using kernels::Isa;

constexpr Format kFormats[] = {Format::kFloat32, Format::kFloat16, Format::kBfloat16};
constexpr Format kMoments[] = {Format::kFloat32, Format::kBfloat16};
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
  Format moment;
  std::optional<Format> output;
  bool is_split;
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
        if (!any_bits) bits = (bits & 0x807fffffU) | 0x3f000000U;
        if (width == sizeof(std::uint16_t)) bits >>= 16;
        std::memcpy(memory.data() + offset + index * width, &bits, width);
      }
      return memory;
    };
    const bool any_bits = seed % 2 != 0;
    gradient_ = fill(kernels::element_bytes(formats.gradient), any_bits);
    for (std::size_t part = 0; part < 3; ++part) wide_[part] = fill(width_of(part), any_bits);
    if (formats.output) output_ = fill(kernels::element_bytes(*formats.output), any_bits);
  }

  void step(const Coefficients& with, Isa isa, const adam::Options& options) {
    adam::update({.gradient = gradient_.data() + offset_,
                  .gradient_format = formats_.gradient,
                  .weight = wide_[0].data() + offset_,
                  .is_split = formats_.is_split,
                  .exp_avg = wide_[1].data() + offset_,
                  .exp_avg_sq = wide_[2].data() + offset_,
                  .moment_format = formats_.moment,
                  .output = output_.data() + offset_,
                  .output_format = formats_.output,
                  .numel = numel_},
                 with, isa, options);
  }

  float value(std::size_t part, std::size_t index) const {
    std::uint32_t bits = 0;
    const std::size_t width = width_of(part);
    std::memcpy(&bits, wide_[part].data() + offset_ + index * width, width);
    return std::bit_cast<float>(width == sizeof(bits) ? bits : bits << 16);
  }

  std::uint16_t output(std::size_t index) const {
    std::uint16_t bits = 0;
    std::memcpy(&bits, output_.data() + offset_ + index * sizeof(bits), sizeof(bits));
    return bits;
  }

  void expect_equal(const Tile& other) const {
    for (std::size_t index = 0; index < numel_; ++index) {
      for (std::size_t part = 0; part < 3; ++part) {
        const float left = value(part, index);
        const float right = other.value(part, index);
        EXPECT((std::isnan(left) && std::isnan(right)) ||
               std::bit_cast<std::uint32_t>(left) == std::bit_cast<std::uint32_t>(right));
      }
      if (!formats_.output) continue;
      const unsigned infinity = *formats_.output == Format::kFloat16 ? 0x7c00 : 0x7f80;
      const unsigned left = output(index);
      const unsigned right = other.output(index);
      const bool both_nan = (left & 0x7fff) > infinity && (right & 0x7fff) > infinity;
      EXPECT(both_nan || left == right);
      if (!formats_.is_split) EXPECT(both_nan == std::isnan(value(0, index)));
    }
  }

 private:
  /// Of weights, and of both moments.
  std::size_t width_of(std::size_t part) const {
    if (part == 0) return formats_.is_split ? sizeof(std::uint16_t) : sizeof(float);
    return kernels::element_bytes(formats_.moment);
  }

  std::size_t numel_;
  Formats formats_;
  std::size_t offset_;
  std::vector<std::byte> gradient_;
  std::vector<std::byte> wide_[3];
  std::vector<std::byte> output_;
};

void test_every_length_gives_the_scalar_bits(Isa isa, const Formats& formats) {
  for (std::size_t numel = 0; numel < 70; ++numel) {
    const std::size_t offset = numel % 5;
    const auto seed = static_cast<unsigned>(numel);
    Tile ours(numel, formats, offset, seed);
    Tile expected(numel, formats, 0, seed);
    for (int round = 0; round < 3; ++round) {
      const Coefficients with = coefficients((static_cast<int>(numel) + round) % 3);
      const adam::Options options{.tail_numel = numel % 8,
                                  .threads = 1,
                                  .rounding_key = numel * 0x9e3779b97f4a7c15U,
                                  .first_index = 0xffffffe0U};
      ours.step(with, isa, options);
      expected.step(with, Isa::kScalar, options);
    }
    ours.expect_equal(expected);
  }
}

void test_every_kernel_gives_the_scalar_bits(Isa isa) {
  for (const Format gradient : kFormats) {
    for (const Format moment : kMoments) {
      for (const std::optional<Format> output : kOutputs) {
        test_every_length_gives_the_scalar_bits(isa, {gradient, moment, output, false});
      }
      test_every_length_gives_the_scalar_bits(isa, {gradient, moment, Format::kBfloat16, true});
    }
  }
}

/// Each operation rounded on its own or fused, in doubles, which hold a product of floats exactly.
void test_one_element_by_hand() {
  const Coefficients with = coefficients(2);
  const Formats wide{Format::kFloat32, Format::kFloat32, std::nullopt, false};
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
                  .moment_format = Format::kFloat32,
                  .output = nullptr,
                  .output_format = {},
                  .numel = 1},
                 with, Isa::kScalar,
                 {.tail_numel = tail_numel, .threads = 1, .rounding_key = 0, .first_index = 0});
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

void test_threads_share_all_blocks_once(Isa isa, Format moment, bool is_split) {
  const Formats formats{Format::kBfloat16, moment, Format::kBfloat16, is_split};
  const std::size_t numel = 5 * adam::kBlockNumel + 13;
  for (const std::size_t tail_numel : {std::size_t{0}, std::size_t{5}, numel}) {
    adam::Options options{
        .tail_numel = tail_numel, .threads = 1, .rounding_key = 77, .first_index = 1000};
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
                            .moment_format = Format::kFloat32,
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
  bad.is_split = true;
  bad.output_format = Format::kFloat16;
  expect_refused([&] { step(bad, {}); });
  bad = good;
  bad.is_split = true;
  expect_refused([&] { step(bad, {}); });
  bad = good;
  bad.moment_format = Format::kFloat16;
  expect_refused([&] { step(bad, {}); });
  bad = good;
  bad.numel = std::numeric_limits<std::size_t>::max();
  expect_refused([&] { step(bad, {}); });
  adam::Options options{.tail_numel = 2, .threads = 1, .rounding_key = 0, .first_index = 0};
  expect_refused([&] { step(good, options); });
  options = {
      .tail_numel = 0, .threads = kernels::kThreadsMax + 1, .rounding_key = 0, .first_index = 0};
  expect_refused([&] { step(good, options); });
  EXPECT(value[1] == 1.0f);
  step({}, {});  // no elements at no address
}

}  // namespace

int main() {
  for (const Isa isa : kernels::available_isas()) {
    test_every_kernel_gives_the_scalar_bits(isa);
    for (const Format moment : kMoments) {
      for (const bool is_split : {false, true}) {
        test_threads_share_all_blocks_once(isa, moment, is_split);
      }
    }
  }
  test_one_element_by_hand();
  test_mistakes_are_refused_and_change_nothing();
  return 0;
}

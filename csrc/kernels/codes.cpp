// Moments to codes and back, an element at a time: only checkpoints and accessors do so.
#include "kernels/codes.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/adam_block.hpp"
#include "kernels/code_lanes.hpp"

namespace memascend::codes {
namespace {

using adam::One;

/// Random bits from kShift on, or a half.
template <int kShift>
float unit_of(const std::optional<Rounding>& rounding, std::size_t index) {
  if (!rounding) return 0.5f;
  return kernels::unit<One, kShift>(kernels::random_words<One>(*rounding, index));
}

/// Calls encode_scale(first, end, scale) for each scale, of which `scale_of` makes the value from
/// the largest magnitude that `prepare` leaves of a value.
template <typename Prepare, typename ScaleOf, typename Encode>
void encode(const float* values, Scales scales, std::size_t numel, Prepare prepare,
            ScaleOf scale_of, Encode encode_one) {
  for (std::size_t first = 0; first < numel; first += kScaleNumel) {
    const std::size_t end = std::min(numel, first + kScaleNumel);
    std::uint32_t most = 0;
    for (std::size_t i = first; i < end; ++i) {
      most = std::max(most, magnitude<One>(prepare(values[i])));
    }
    const Scale scale = scale_of(most);
    scales.start[first / kScaleNumel * scales.stride] = scale.value;
    for (std::size_t i = first; i < end; ++i) {
      encode_one(i, scale.is_nan() ? 0.0f : prepare(values[i]), scale.inverse);
    }
  }
}

}  // namespace

void encode_first(const float* values, std::int8_t* codes, Scales scales, std::size_t numel,
                  std::optional<Rounding> rounding) {
  const auto prepare = [](float value) { return value; };
  encode(values, scales, numel, prepare, first_scale,
         [&](std::size_t i, float value, float inverse) {
           codes[i] =
               static_cast<std::int8_t>(first_code<One>(value, inverse, unit_of<0>(rounding, i)));
         });
}

void encode_second(const float* values, std::uint8_t* codes, Scales scales, std::size_t numel,
                   std::optional<Rounding> rounding) {
  const auto prepare = [](float value) { return std::sqrt(value); };
  encode(values, scales, numel, prepare, second_scale,
         [&](std::size_t i, float root, float inverse) {
           codes[i] = static_cast<std::uint8_t>(
               second_code<One>(root, inverse, unit_of<kernels::kRandomBits>(rounding, i)));
         });
}

void decode_first(const std::int8_t* codes, Scales scales, float* values, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float scale = scales.start[i / kScaleNumel * scales.stride];
    values[i] = first_of<One>(static_cast<std::uint32_t>(std::int32_t{codes[i]}), scale);
  }
}

void decode_second(const std::uint8_t* codes, Scales scales, float* values, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float scale = scales.start[i / kScaleNumel * scales.stride];
    const float root = second_root_of<One>(codes[i], scale);
    values[i] = root * root;
  }
}

}  // namespace memascend::codes

// Moments in 8 bits: a code for each element, and for every kScaleNumel of them an fp32 scale,
// which gives the largest moment the largest code.
//
//   first moment     m = (code * |code|) * scale            code -127 to 127
//   second moment    v = ((code * code) * scale)^2          code 0 to 255
//
// Codes are the square root of |m| and the fourth root of v: the numbers lie closest where they are
// small. A moment becomes one of the two next to it, at random (code_lanes.hpp), so that its
// expected value is itself within 1/8192 of their distance. With rounding to nearest v would not
// follow smaller gradients: a usual change, 1/1000 in a step, is less than half of that distance
// everywhere. v is never zero where it was not, since the step divides by its root.
//
// A scale is zero where all moments are, and otherwise has a least value, at which moments are
// those of a fixed grid. Where a moment is infinite or NaN, or v is negative, the scale is NaN and
// with it all moments that share it; their codes are zero.
//
// Knows addresses and counts; must never know tensors, optimizers or steps. Any thread may call
// every function here; the caller keeps the memory alive and lets no other thread use it. Floats
// are aligned, and no two parts may overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/rounding.hpp"

namespace memascend::codes {

/// Elements that share a scale, from the first of the sub-group on; the last scale may have fewer.
inline constexpr std::size_t kScaleNumel = 128;
/// What codes of the largest moment stand for: 127^2, and 255^2 of a root.
inline constexpr float kFirstMost = 16129.0f;
inline constexpr float kSecondMost = 65025.0f;
/// Scales but zero are at least this: neither their inverse nor the square of one is beyond fp32.
inline constexpr float kFirstScaleLeast = 1e-37f;
inline constexpr float kSecondScaleLeast = 1e-18f;

/// Scale of element i: scales[i / kScaleNumel * stride].
struct Scales {
  float* start;
  std::size_t stride;
};

using kernels::Rounding;

/// Codes and scales of moments; without a rounding they are the nearest. Values begin where a scale
/// does.
void encode_first(const float* values, std::int8_t* codes, Scales scales, std::size_t numel,
                  std::optional<Rounding> rounding);
void encode_second(const float* values, std::uint8_t* codes, Scales scales, std::size_t numel,
                   std::optional<Rounding> rounding);

void decode_first(const std::int8_t* codes, Scales scales, float* values, std::size_t numel);
void decode_second(const std::uint8_t* codes, Scales scales, float* values, std::size_t numel);

}  // namespace memascend::codes

// Weights of 24 bits: an fp32 weight as the bf16 number that it rounds to, and a remainder of 8
// bits, in 1/256 of that number's last place: weight bits = (rounded << 16) + (remainder << 8).
//
// The 8 bits that are lacking are rounded stochastically, with a mean that is exact. Remainders are
// -127 to 127: then the weight that is stored rounds to the bf16 number beside it, and fp32 files
// give back the same pair. A NaN stays a NaN.
//
// Knows addresses and counts; must never know tensors, optimizers or steps. Any thread may call
// every function here; the caller keeps the memory alive and lets no other thread use it. Numbers
// are aligned to their size, and no two parts may overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/rounding.hpp"

namespace memascend::remainders {

inline constexpr std::uint32_t kMost = 127;

void join(const std::uint16_t* rounded, const std::int8_t* remainders, float* weights,
          std::size_t numel);

/// Without a rounding the pair is the nearest.
void cut(const float* weights, std::uint16_t* rounded, std::int8_t* remainders, std::size_t numel,
         std::optional<kernels::Rounding> rounding);

}  // namespace memascend::remainders

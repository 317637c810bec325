// Weights in two halves: an fp32 weight as the bf16 number that it rounds to, and its low 16 bits.
//
// Rounding to nearest even adds one to the high 16 bits, or nothing, and the low ones tell which,
// but for a tie: low bits of 0x8000 round to the even number below or above. A flag says which, and
// is set where the high half is odd. It lies in the sign of the second moment, which is never
// negative: a sum of products of numbers that are not. 32,640 of all 2^32 patterns are ties with an
// odd high half. A NaN stays a NaN, its payload may differ.
//
// Where second moments have no sign (codes.hpp) there are no flags: a tie above an odd high half is
// stored as the next number, which rounds to the same. Where there are no second moments (Muon) the
// flags are bits of their own: bit i % 8 of byte i / 8.
//
// Knows addresses and counts; must never know tensors, optimizers or steps. Any thread may call
// every function here; the caller keeps the memory alive and lets no other thread use it. Numbers
// are aligned to their size, and no two parts may overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format.hpp"

namespace memascend::halves {

/// A flagged weight's last 17 bits, and the mask of these.
inline constexpr std::uint32_t kTie = 0x18000;
inline constexpr std::uint32_t kTieMask = 0x1ffff;
/// Low bits above this, or equal to it with the flag, carry over when they are added to it.
inline constexpr std::uint32_t kHalfLess = 0x7fff;
inline constexpr std::uint32_t kSign = 0x80000000;
inline constexpr std::uint32_t kMagnitude = 0x7fffffff;

/// Weights of halves: `rounded` with the flags in the signs of `flags`, numbers of `flag_format`
/// (fp32 or bf16). Without flags (null) `rounded` are the exact high halves.
void join(const std::uint16_t* rounded, const std::uint16_t* low, const void* flags,
          kernels::Format flag_format, std::uint32_t* weights, std::size_t numel);

/// The exact high halves and the low ones of weights.
void cut(const std::uint32_t* weights, std::uint16_t* high, std::uint16_t* low, std::size_t numel);

/// Makes exact high halves, in place, the numbers that the weights round to, and sets or clears all
/// flags.
void round_high(std::uint16_t* high, const std::uint16_t* low, void* flags,
                kernels::Format flag_format, std::size_t numel);

/// The same without flags.
void join_without_flags(const std::uint16_t* rounded, const std::uint16_t* low,
                        std::uint32_t* weights, std::size_t numel);
void round_high_without_flags(std::uint16_t* high, std::uint16_t* low, std::size_t numel);

/// Weights of halves whose flags are bits, of which `first` is the first.
void join_with_bits(const std::uint16_t* rounded, const std::uint16_t* low,
                    const std::uint8_t* bits, std::size_t first, std::uint32_t* weights,
                    std::size_t numel);

/// The numbers that weights round to, the low halves, and the flags from bit 0 on. Bits behind the
/// last flag of its byte are 0.
void cut_with_bits(const std::uint32_t* weights, std::uint16_t* rounded, std::uint16_t* low,
                   std::uint8_t* bits, std::size_t numel);

/// Takes the flags out of second moments, which are then as if nothing had been split.
void clear_flags(void* flags, kernels::Format flag_format, std::size_t numel);

}  // namespace memascend::halves

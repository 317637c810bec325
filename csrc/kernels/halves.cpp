// Weights in two halves. Plain loops, which the compiler turns into vectors: memory bounds them.
#include "kernels/halves.hpp"

#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "kernels/narrow.hpp"

namespace memascend::halves {
namespace {

using kernels::Format;

/// The flags as bits of what they are a sign of.
template <typename Bits>
struct Flags {
  static constexpr Bits kFlag = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));

  static std::uint32_t get(Bits bits) { return bits >> (8 * sizeof(Bits) - 1); }
  static Bits with(Bits bits, bool is_set) {
    return static_cast<Bits>((bits & ~kFlag) | (is_set ? kFlag : 0));
  }
};

/// `flag` is 0 or 1.
std::uint32_t joined(std::uint16_t rounded, std::uint16_t low, std::uint32_t flag) {
  const std::uint32_t carry = (low + flag + kHalfLess) >> 16;
  return (rounded - carry) << 16 | low;
}

template <typename Bits>
void join_flagged(const std::uint16_t* rounded, const std::uint16_t* low, const Bits* flags,
                  std::uint32_t* weights, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    weights[i] = joined(rounded[i], low[i], Flags<Bits>::get(flags[i]));
  }
}

template <typename Bits>
void round_high_flagged(std::uint16_t* high, const std::uint16_t* low, Bits* flags,
                        std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t weight = std::uint32_t{high[i]} << 16 | low[i];
    flags[i] = Flags<Bits>::with(flags[i], (weight & kTieMask) == kTie);
    high[i] = kernels::Bfloat16::narrow(std::bit_cast<float>(weight));
  }
}

template <typename Bits>
void clear(Bits* flags, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) flags[i] = Flags<Bits>::with(flags[i], false);
}

/// Flags in a byte.
constexpr std::size_t kByte = 8;

void join_each(const std::uint16_t* rounded, const std::uint16_t* low, std::uint32_t bits,
               std::uint32_t* weights, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) weights[i] = joined(rounded[i], low[i], bits >> i & 1);
}

std::uint8_t cut_each(const std::uint32_t* weights, std::uint16_t* rounded, std::uint16_t* low,
                      std::size_t numel) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < numel; ++i) {
    bits |= std::uint32_t{(weights[i] & kTieMask) == kTie} << i;
    low[i] = static_cast<std::uint16_t>(weights[i]);
    rounded[i] = kernels::Bfloat16::narrow(std::bit_cast<float>(weights[i]));
  }
  return static_cast<std::uint8_t>(bits);
}

bool is_wide(Format format) {
  MA_EXPECT(format != Format::kFloat16, "flags are signs of float32 or bfloat16 numbers");
  return format == Format::kFloat32;
}

}  // namespace

void join(const std::uint16_t* rounded, const std::uint16_t* low, const void* flags,
          Format flag_format, std::uint32_t* weights, std::size_t numel) {
  if (flags == nullptr) {
    for (std::size_t i = 0; i < numel; ++i) weights[i] = std::uint32_t{rounded[i]} << 16 | low[i];
  } else if (is_wide(flag_format)) {
    join_flagged(rounded, low, static_cast<const std::uint32_t*>(flags), weights, numel);
  } else {
    join_flagged(rounded, low, static_cast<const std::uint16_t*>(flags), weights, numel);
  }
}

void cut(const std::uint32_t* weights, std::uint16_t* high, std::uint16_t* low, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    high[i] = static_cast<std::uint16_t>(weights[i] >> 16);
    low[i] = static_cast<std::uint16_t>(weights[i]);
  }
}

void round_high(std::uint16_t* high, const std::uint16_t* low, void* flags, Format flag_format,
                std::size_t numel) {
  if (is_wide(flag_format)) {
    round_high_flagged(high, low, static_cast<std::uint32_t*>(flags), numel);
  } else {
    round_high_flagged(high, low, static_cast<std::uint16_t*>(flags), numel);
  }
}

void join_without_flags(const std::uint16_t* rounded, const std::uint16_t* low,
                        std::uint32_t* weights, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) weights[i] = joined(rounded[i], low[i], 0);
}

void round_high_without_flags(std::uint16_t* high, std::uint16_t* low, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t weight = std::uint32_t{high[i]} << 16 | low[i];
    low[i] = static_cast<std::uint16_t>(low[i] + ((weight & kTieMask) == kTie));
    high[i] = kernels::Bfloat16::narrow(std::bit_cast<float>(weight));
  }
}

void join_with_bits(const std::uint16_t* rounded, const std::uint16_t* low,
                    const std::uint8_t* bits, std::size_t first, std::uint32_t* weights,
                    std::size_t numel) {
  bits += first / kByte;
  const std::size_t skipped = first % kByte;
  std::size_t done = 0;
  if (skipped != 0) {
    done = std::min(numel, kByte - skipped);
    join_each(rounded, low, std::uint32_t{*bits++} >> skipped, weights, done);
  }
  for (; done + kByte <= numel; done += kByte) {  // a constant count becomes vectors
    join_each(rounded + done, low + done, *bits++, weights + done, kByte);
  }
  if (done < numel) join_each(rounded + done, low + done, *bits, weights + done, numel - done);
}

void cut_with_bits(const std::uint32_t* weights, std::uint16_t* rounded, std::uint16_t* low,
                   std::uint8_t* bits, std::size_t numel) {
  std::size_t done = 0;
  for (; done + kByte <= numel; done += kByte) {
    *bits++ = cut_each(weights + done, rounded + done, low + done, kByte);
  }
  if (done < numel) *bits = cut_each(weights + done, rounded + done, low + done, numel - done);
}

void clear_flags(void* flags, Format flag_format, std::size_t numel) {
  if (is_wide(flag_format)) {
    clear(static_cast<std::uint32_t*>(flags), numel);
  } else {
    clear(static_cast<std::uint16_t*>(flags), numel);
  }
}

}  // namespace memascend::halves

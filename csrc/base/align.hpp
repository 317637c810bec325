// Arithmetic on sizes and alignments. Pure; callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memascend {

constexpr bool is_power_of_two(std::uint64_t value) {
  return value != 0 && (value & (value - 1)) == 0;
}

/// Largest multiple of `alignment` (a power of two) that is not above `value`.
constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value & ~(alignment - 1);
}

/// Smallest multiple of `alignment` (a power of two) that is not below `value`.
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

constexpr bool is_aligned(std::uint64_t value, std::uint64_t alignment) {
  return (value & (alignment - 1)) == 0;
}

inline bool is_aligned(const void* address, std::uint64_t alignment) {
  return is_aligned(reinterpret_cast<std::uintptr_t>(address), alignment);
}

}  // namespace memascend

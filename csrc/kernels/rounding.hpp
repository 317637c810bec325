// The randomness of stochastic rounding.
#pragma once

#include <cstdint>

namespace memascend::kernels {

/// An element's random bits depend only on the key and its index, modulo 2^32.
struct Rounding {
  std::uint64_t key = 0;          // differs for each step and sub-group
  std::uint64_t first_index = 0;  // of the first element, in its sub-group
};

}  // namespace memascend::kernels

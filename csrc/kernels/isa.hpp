// The instruction sets with kernels, and those that this machine supports.
#pragma once

#include <string_view>
#include <vector>

namespace memascend::kernels {

/// Instruction sets with kernels of their own. All give the same bits.
enum class Isa { kScalar, kAvx2, kAvx512 };

/// The instruction sets that this CPU and operating system support, slowest first. Never empty.
std::vector<Isa> available_isas();

std::string_view name(Isa isa);

/// "auto" is the fastest available. Throws std::invalid_argument for an unknown or unavailable
/// name.
Isa parse_isa(std::string_view text);

}  // namespace memascend::kernels

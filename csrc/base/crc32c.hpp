// CRC-32C: the Castagnoli checksum of iSCSI (RFC 3720, appendix B.4), ext4 and btrfs.
//
// Polynomial 0x1EDC6F41, reflected, complemented at start and end. Detects every flipped bit, every
// burst of up to 32 bits, and other errors except one in 2^32. Pure; callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace memascend {

/// The checksum of `bytes`; or of earlier bytes, whose checksum is `previous`, and `bytes`. Uses
/// the fastest method of this processor.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t previous = 0);

/// A method to compute it. All give the same bits.
struct Crc32cMethod {
  std::string_view name;  // "tables", "sse4.2" or "vpclmulqdq"
  /// Continues from a state that is not complemented.
  std::uint32_t (*add)(std::uint32_t state, std::span<const std::byte> bytes);
};

/// The methods of this processor, slowest first; the tables work on any.
std::vector<Crc32cMethod> crc32c_methods();

std::uint32_t crc32c_by(const Crc32cMethod& method, std::span<const std::byte> bytes,
                        std::uint32_t previous = 0);

}  // namespace memascend

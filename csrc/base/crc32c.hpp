// CRC-32C: the Castagnoli checksum of iSCSI (RFC 3720, appendix B.4), ext4 and btrfs.
//
// Polynomial 0x1EDC6F41, reflected, first and last complemented. Finds every flipped bit, every
// burst of up to 32 bits, and all but one in 2^32 of anything else. Pure; callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace memascend {

/// The checksum of `bytes`, or of what came before them, whose checksum is `previous`, and `bytes`.
/// By the processor's instruction where it has one.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t previous = 0);

/// Computes it by tables alone, on any processor.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t previous = 0);

/// The way crc32c() works here: "sse4.2" or "tables".
std::string_view crc32c_method();

}  // namespace memascend

// Eight table look-ups for eight bytes (Kounavis and Berry, Intel 2005, "slicing by 8"), or
// SSE4.2's instruction on three streams at once (Gopal et al., Intel 2011, "Fast CRC Computation
// for iSCSI Polynomial Using CRC32 Instruction"): the instruction gives a result each cycle, but
// only three cycles after it has begun. The streams are put together by moving the first two past
// what follows them, which is a multiplication by a power of x modulo the polynomial.
#include "base/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace memascend {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected: bit 31 is x^0

constexpr std::uint32_t times_x(std::uint32_t value) {
  return (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
}

using Table = std::array<std::uint32_t, 256>;

// [0] is a byte's own checksum, [n] that of a byte with n zero bytes behind it.
constexpr std::array<Table, 8> make_slices() {
  std::array<Table, 8> slices{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    slices[0][value] = crc;
  }
  for (std::size_t slice = 1; slice < slices.size(); ++slice) {
    for (std::size_t value = 0; value < 256; ++value) {
      const std::uint32_t before = slices[slice - 1][value];
      slices[slice][value] = (before >> 8) ^ slices[0][before & 0xff];
    }
  }
  return slices;
}

constexpr std::array<Table, 8> kSlices = make_slices();

std::uint32_t add_byte(std::uint32_t crc, std::byte byte) {
  return (crc >> 8) ^ kSlices[0][(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
}

std::uint64_t load(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#if defined(__x86_64__)

constexpr std::uint32_t multiply(std::uint32_t left, std::uint32_t right) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((left & bit) != 0) product ^= right;
    right = times_x(right);
  }
  return product;
}

/// Moves a checksum past a fixed number of bytes: one table for each of its own bytes.
using Shift = std::array<Table, 4>;

constexpr Shift make_shift(std::size_t nbytes) {
  std::uint32_t power = std::uint32_t{1} << 31;         // x^0, becomes x^(8 nbytes)
  std::uint32_t square = std::uint32_t{1} << (31 - 8);  // x^8
  for (; nbytes != 0; nbytes >>= 1) {
    if ((nbytes & 1) != 0) power = multiply(power, square);
    square = multiply(square, square);
  }
  Shift shift{};
  for (std::size_t place = 0; place < shift.size(); ++place) {
    for (std::uint32_t bit = 0; bit < 8; ++bit) {
      const std::uint32_t one = multiply(power, std::uint32_t{1} << (8 * place + bit));
      for (std::size_t value = 0; value < 256; ++value) {
        if ((value >> bit & 1) != 0) shift[place][value] ^= one;
      }
    }
  }
  return shift;
}

std::uint32_t apply(const Shift& shift, std::uint32_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^
         shift[3][crc >> 24];
}

// Bytes of one stream: three of the long ones are nearly all of 64 KiB.
constexpr std::size_t kLongBytes = 21840;
constexpr std::size_t kShortBytes = 256;
constexpr Shift kLongShift = make_shift(kLongBytes);
constexpr Shift kShortShift = make_shift(kShortBytes);

// Takes three streams at a time off the front of `bytes` for as long as there are three.
__attribute__((target("sse4.2"))) std::uint32_t add_streams(std::uint32_t crc,
                                                            std::span<const std::byte>* bytes,
                                                            std::size_t stream_bytes,
                                                            const Shift& shift) {
  while (bytes->size() >= 3 * stream_bytes) {
    const std::byte* data = bytes->data();
    std::uint64_t first = crc;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t index = 0; index < stream_bytes; index += 8) {
      first = _mm_crc32_u64(first, load(data + index));
      second = _mm_crc32_u64(second, load(data + stream_bytes + index));
      third = _mm_crc32_u64(third, load(data + 2 * stream_bytes + index));
    }
    crc = apply(shift, static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    crc = apply(shift, crc) ^ static_cast<std::uint32_t>(third);
    *bytes = bytes->subspan(3 * stream_bytes);
  }
  return crc;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::span<const std::byte> bytes,
                                                             std::uint32_t previous) {
  std::uint32_t crc = add_streams(~previous, &bytes, kLongBytes, kLongShift);
  crc = add_streams(crc, &bytes, kShortBytes, kShortShift);
  std::uint64_t wide = crc;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8))
    wide = _mm_crc32_u64(wide, load(bytes.data()));
  crc = static_cast<std::uint32_t>(wide);
  for (const std::byte byte : bytes) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(byte));
  return ~crc;
}

bool has_instruction() {
  static const bool found = __builtin_cpu_supports("sse4.2") != 0;
  return found;
}

#else

bool has_instruction() { return false; }

#endif

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t previous) {
  std::uint32_t crc = ~previous;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    const std::uint64_t word = load(bytes.data()) ^ crc;
    crc = 0;
    for (std::size_t place = 0; place < 8; ++place) {
      crc ^= kSlices[7 - place][word >> (8 * place) & 0xff];
    }
  }
  for (const std::byte byte : bytes) crc = add_byte(crc, byte);
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t previous) {
#if defined(__x86_64__)
  if (has_instruction()) return crc32c_sse42(bytes, previous);
#endif
  return crc32c_portable(bytes, previous);
}

std::string_view crc32c_method() { return has_instruction() ? "sse4.2" : "tables"; }

}  // namespace memascend

// Three methods:
// - Eight table look-ups per eight bytes (Kounavis and Berry, Intel 2005, "slicing by 8").
// - SSE4.2's instruction on three streams at once (Gopal et al., Intel 2011, "Fast CRC Computation
//   for iSCSI Polynomial Using CRC32 Instruction"): it has a throughput of one per cycle, but a
//   latency of three cycles. The streams are combined by shifting the first two past the bytes that
//   follow them: a multiplication by a power of x modulo the polynomial.
// - VPCLMULQDQ (Gopal et al., Intel 2009, "Fast CRC Computation for Generic Polynomials Using
//   PCLMULQDQ Instruction"): 256 bytes at a time are shifted past the next 256 and added to them,
//   by carry-less multiplications with such powers. The last 256 bytes then have the same checksum
//   as all bytes before, and the second method computes it.
#include "base/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memascend {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected: bit 31 is x^0

constexpr std::uint32_t times_x(std::uint32_t value) {
  return (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
}

using Table = std::array<std::uint32_t, 256>;

// [0] is a byte's own checksum, [n] that of a byte followed by n zero bytes.
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

/// x to the power of `exponent`.
constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t power = std::uint32_t{1} << 31;   // x^0
  std::uint32_t square = std::uint32_t{1} << 30;  // x^1
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power = multiply(power, square);
    square = multiply(square, square);
  }
  return power;
}

/// Shifts a checksum past a fixed number of bytes: one table for each byte of the checksum.
using Shift = std::array<Table, 4>;

constexpr Shift make_shift(std::size_t nbytes) {
  const std::uint32_t power = power_of_x(8 * nbytes);
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

// Bytes of one stream: three of the long ones are nearly 64 KiB.
constexpr std::size_t kLongBytes = 21840;
constexpr std::size_t kShortBytes = 256;
constexpr Shift kLongShift = make_shift(kLongBytes);
constexpr Shift kShortShift = make_shift(kShortBytes);

// Removes three streams at a time from the front of `bytes`, as long as there are three.
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

// The state is not complemented, neither at the start nor at the end.
__attribute__((target("sse4.2"))) std::uint32_t add_by_instruction(
    std::uint32_t crc, std::span<const std::byte> bytes) {
  crc = add_streams(crc, &bytes, kLongBytes, kLongShift);
  crc = add_streams(crc, &bytes, kShortBytes, kShortShift);
  std::uint64_t wide = crc;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8))
    wide = _mm_crc32_u64(wide, load(bytes.data()));
  crc = static_cast<std::uint32_t>(wide);
  for (const std::byte byte : bytes) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(byte));
  return crc;
}

#define MA_VECTOR __attribute__((target("avx2,vpclmulqdq,sse4.2")))

constexpr std::size_t kVectorBytes = sizeof(__m256i);
constexpr std::size_t kVectorCount = 8;  // so that the latencies of the instruction overlap
constexpr std::size_t kFoldBytes = kVectorCount * kVectorBytes;

// The factors that shift 16 bytes past `nbytes`: the low half is for the first 8 of them, which are
// 64 powers higher. The product of two reflected numbers has one power of x too many, so the
// factors have one less.
constexpr std::uint64_t fold_factor(std::size_t nbytes, std::size_t more_bits) {
  return std::uint64_t{power_of_x(8 * nbytes + more_bits - 1)} << 32;
}

MA_VECTOR __m256i load_vector(const std::byte* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

MA_VECTOR __m256i fold(__m256i sum, __m256i factors, const std::byte* next) {
  const __m256i first = _mm256_clmulepi64_epi128(sum, factors, 0x00);
  const __m256i second = _mm256_clmulepi64_epi128(sum, factors, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(first, load_vector(next)), second);
}

// The same as add_by_instruction().
MA_VECTOR std::uint32_t add_by_vectors(std::uint32_t crc, std::span<const std::byte> bytes) {
  if (bytes.size() < 2 * kFoldBytes) return add_by_instruction(crc, bytes);
  constexpr auto kFirst = static_cast<long long>(fold_factor(kFoldBytes, 64));
  constexpr auto kSecond = static_cast<long long>(fold_factor(kFoldBytes, 0));
  const __m256i factors = _mm256_set_epi64x(kSecond, kFirst, kSecond, kFirst);
  __m256i sums[kVectorCount];
  for (std::size_t index = 0; index < kVectorCount; ++index) {
    sums[index] = load_vector(bytes.data() + index * kVectorBytes);
  }
  sums[0] = _mm256_xor_si256(sums[0], _mm256_set_epi64x(0, 0, 0, crc));
  bytes = bytes.subspan(kFoldBytes);
  for (; bytes.size() >= kFoldBytes; bytes = bytes.subspan(kFoldBytes)) {
    for (std::size_t index = 0; index < kVectorCount; ++index) {
      sums[index] = fold(sums[index], factors, bytes.data() + index * kVectorBytes);
    }
  }
  std::array<std::byte, kFoldBytes> left;
  std::memcpy(left.data(), sums, kFoldBytes);
  return add_by_instruction(add_by_instruction(0, left), bytes);
}

#undef MA_VECTOR

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }

bool has_vectors() {
  return has_instruction() && __builtin_cpu_supports("avx2") != 0 &&
         __builtin_cpu_supports("vpclmulqdq") != 0;
}

#endif

std::uint32_t add_by_tables(std::uint32_t crc, std::span<const std::byte> bytes) {
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    const std::uint64_t word = load(bytes.data()) ^ crc;
    crc = 0;
    for (std::size_t place = 0; place < 8; ++place) {
      crc ^= kSlices[7 - place][word >> (8 * place) & 0xff];
    }
  }
  for (const std::byte byte : bytes) crc = add_byte(crc, byte);
  return crc;
}

}  // namespace

std::vector<Crc32cMethod> crc32c_methods() {
  std::vector<Crc32cMethod> methods{{"tables", &add_by_tables}};
#if defined(__x86_64__)
  if (has_instruction()) methods.push_back({"sse4.2", &add_by_instruction});
  if (has_vectors()) methods.push_back({"vpclmulqdq", &add_by_vectors});
#endif
  return methods;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t previous) {
  static const Crc32cMethod fastest = crc32c_methods().back();
  return crc32c_by(fastest, bytes, previous);
}

std::uint32_t crc32c_by(const Crc32cMethod& method, std::span<const std::byte> bytes,
                        std::uint32_t previous) {
  return ~method.add(~previous, bytes);
}

}  // namespace memascend

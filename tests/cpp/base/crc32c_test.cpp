// sources: csrc/base/crc32c.cpp
//
// CRC-32C against published values, and between the ways to compute it.
#include "base/crc32c.hpp"

#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.hpp"

namespace memascend {
namespace {

using Bytes = std::vector<std::byte>;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// RFC 3720, appendix B.4, and the usual check value.
void published_values_come_out() {
  Bytes rising(32);
  for (std::size_t index = 0; index < 32; ++index) rising[index] = static_cast<std::byte>(index);
  Bytes falling(rising.rbegin(), rising.rend());
  struct Vector {
    Bytes bytes;
    std::uint32_t crc;
  };
  const Vector vectors[] = {
      {{}, 0},
      {Bytes(32, std::byte{0}), 0x8a9136aa},
      {Bytes(32, std::byte{0xff}), 0x62a8ab43},
      {rising, 0x46dd794e},
      {falling, 0x113fdb5c},
  };
  for (const Vector& vector : vectors) {
    for (const Crc32cMethod& method : crc32c_methods()) {
      MA_INVARIANT(crc32c_by(method, vector.bytes) == vector.crc);
    }
  }
  MA_INVARIANT(crc32c(bytes_of("123456789")) == 0xe3069283);
}

// Sizes around those of the streams and of the vectors, at odd addresses, in one piece and in two.
void all_ways_agree() {
  std::mt19937_64 random(1);
  Bytes memory(200'000);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  std::vector<std::size_t> sizes{767,   768,   769,     1023,    1024,   65519,
                                 65520, 65536, 131'073, 199'990, 199'936};
  for (std::size_t size = 1; size < 600; ++size) sizes.push_back(size);
  for (const std::size_t size : sizes) {
    for (const std::size_t shift : {0, 1, 5}) {
      const std::span<const std::byte> bytes = std::span(memory).subspan(shift, size);
      const std::size_t cut = random() % size;
      const std::uint32_t crc = crc32c(bytes);
      for (const Crc32cMethod& method : crc32c_methods()) {
        MA_INVARIANT(crc32c_by(method, bytes) == crc);
        const std::uint32_t first = crc32c_by(method, bytes.first(cut));
        MA_INVARIANT(crc32c_by(method, bytes.subspan(cut), first) == crc);
      }
    }
  }
}

}  // namespace
}  // namespace memascend

int main() {
  for (const memascend::Crc32cMethod& method : memascend::crc32c_methods()) {
    std::printf("crc32c by %s\n", std::string(method.name).c_str());
  }
  memascend::published_values_come_out();
  memascend::all_ways_agree();
  return 0;
}

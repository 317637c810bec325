// sources: csrc/base/crc32c.cpp
//
// CRC-32C against published values, and between the instruction and the portable way.
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
    MA_INVARIANT(crc32c(vector.bytes) == vector.crc);
    MA_INVARIANT(crc32c_portable(vector.bytes) == vector.crc);
  }
  MA_INVARIANT(crc32c(bytes_of("123456789")) == 0xe3069283);
  MA_INVARIANT(crc32c_portable(bytes_of("123456789")) == 0xe3069283);
}

// Sizes around those of the streams, at odd addresses, in one piece and in two.
void both_ways_agree() {
  std::mt19937_64 random(1);
  Bytes memory(200'000);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{255}, std::size_t{767},
        std::size_t{768}, std::size_t{769}, std::size_t{65519}, std::size_t{65520},
        std::size_t{65536}, std::size_t{131'073}, std::size_t{199'990}}) {
    for (const std::size_t shift : {0, 1, 5}) {
      const std::span<const std::byte> bytes = std::span(memory).subspan(shift, size);
      const std::uint32_t crc = crc32c(bytes);
      MA_INVARIANT(crc == crc32c_portable(bytes));
      const std::size_t cut = random() % size;
      MA_INVARIANT(crc32c(bytes.subspan(cut), crc32c(bytes.first(cut))) == crc);
    }
  }
}

}  // namespace
}  // namespace memascend

int main() {
  std::printf("crc32c by %s\n", std::string(memascend::crc32c_method()).c_str());
  memascend::published_values_come_out();
  memascend::both_ways_agree();
  return 0;
}

// sources: csrc/kernels/overflow*.cpp csrc/kernels/isa.cpp csrc/kernels/threads.cpp
//
// Every kernel of this CPU at every offset and length around its loop, on memory whose exact bounds
// a sanitizer watches, and many threads on one scan.
#include "kernels/overflow.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

namespace {

using namespace memascend;
using kernels::Format;
using kernels::Isa;

int failures = 0;

void check(bool holds, const char* what, Isa isa, Format format, std::size_t numel) {
  if (holds) return;
  ++failures;
  std::printf("FAILED %s: isa %s, format %d, numel %zu\n", what,
              std::string(kernels::name(isa)).c_str(), static_cast<int>(format), numel);
}

constexpr Format kFormats[] = {Format::kFloat32, Format::kFloat16, Format::kBfloat16};

/// Bits of 2.0 and of infinity.
std::uint32_t two(Format format) {
  if (format == Format::kFloat32) return 0x40000000;
  return 0x4000;  // in both 16-bit formats
}
std::uint32_t infinity(Format format) {
  if (format == Format::kFloat32) return 0x7f800000;
  return format == Format::kFloat16 ? 0x7c00 : 0x7f80;
}

void put(std::byte* memory, Format format, std::size_t index, std::uint32_t bits) {
  const std::size_t width = kernels::element_bytes(format);
  std::memcpy(memory + index * width, &bits, width);  // x86 and Arm Linux are little-endian
}

void test_every_length_and_offset(Isa isa, Format format) {
  const std::size_t width = kernels::element_bytes(format);
  for (std::size_t offset = 0; offset < 9; ++offset) {
    for (std::size_t numel = 0; numel < 300; ++numel) {
      // Ends exactly where the elements end: a read beyond is a sanitizer's finding.
      std::vector<std::byte> memory(offset + numel * width);
      std::byte* start = memory.data() + offset;
      for (std::size_t index = 0; index < numel; ++index) put(start, format, index, two(format));
      const auto clean = overflow::scan(start, numel, format, isa, {.sum_squares = true});
      check(!clean.non_finite, "clean memory is finite", isa, format, numel);
      check(clean.sum_squares == 4.0 * static_cast<double>(numel), "sum", isa, format, numel);
      if (numel == 0) continue;
      put(start, format, numel - 1, infinity(format));
      check(overflow::scan(start, numel, format, isa, {}).non_finite, "last element", isa, format,
            numel);
      const auto dirty = overflow::scan(start, numel, format, isa, {.sum_squares = true});
      check(dirty.non_finite, "last element while summing", isa, format, numel);
      check(std::isnan(dirty.sum_squares), "no sum beside a finding", isa, format, numel);
    }
  }
}

void test_threads_agree_and_find(Isa isa, Format format) {
  const std::size_t numel = (std::size_t{9} << 20) + 3;
  std::vector<std::byte> memory(numel * kernels::element_bytes(format));
  for (std::size_t index = 0; index < numel; index += 7) {
    put(memory.data(), format, index, two(format));
  }
  const auto alone =
      overflow::scan(memory.data(), numel, format, isa, {.sum_squares = true, .threads = 1});
  for (const std::size_t threads : {0U, 2U, 5U, 32U}) {
    const auto shared = overflow::scan(memory.data(), numel, format, isa,
                                       {.sum_squares = true, .threads = threads});
    check(std::bit_cast<std::uint64_t>(shared.sum_squares) ==
              std::bit_cast<std::uint64_t>(alone.sum_squares),
          "same bits for every thread count", isa, format, numel);
  }
  put(memory.data(), format, numel / 2, infinity(format));
  for (const bool sum_squares : {false, true}) {
    check(overflow::scan(memory.data(), numel, format, isa,
                         {.sum_squares = sum_squares, .threads = 5})
              .non_finite,
          "found by some thread", isa, format, numel);
  }
}

template <typename Call>
void check_refused(const char* what, Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  ++failures;
  std::printf("FAILED to refuse %s\n", what);
}

void test_mistakes_are_refused() {
  const auto scan = [](const void* address, std::size_t numel, std::size_t threads) {
    overflow::scan(address, numel, Format::kFloat32, Isa::kScalar, {.threads = threads});
  };
  const float value = 1.0f;
  check_refused("address 0", [&] { scan(nullptr, 1, 0); });
  check_refused("too many threads", [&] { scan(&value, 1, kernels::kThreadsMax + 1); });
  check_refused("more bytes than there are",
                [&] { scan(&value, std::numeric_limits<std::size_t>::max(), 0); });
  check_refused("an unknown isa", [] { kernels::parse_isa("mmx"); });
  check_refused("an unknown format", [] { kernels::parse_format("float64"); });
}

}  // namespace

int main() {
  for (const Isa isa : kernels::available_isas()) {
    for (const Format format : kFormats) {
      test_every_length_and_offset(isa, format);
      test_threads_agree_and_find(isa, format);
    }
  }
  test_mistakes_are_refused();
  return failures == 0 ? 0 : 1;
}

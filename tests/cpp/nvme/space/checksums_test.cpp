// sources: csrc/base/*.cpp csrc/nvme/space/checksums.cpp
//
// The tables of checksums.
#include "nvme/space/checksums.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "base/check.hpp"
#include "base/crc32c.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kGrain = Checksums::kGrainBytes;
constexpr std::uint64_t kPageSpan = std::uint64_t{64} << 20;  // of a volume, behind one page

using Bytes = std::vector<std::byte>;

void every_flipped_bit_is_found() {
  Bytes grain(kGrain, std::byte{0x5a});
  const std::uint32_t crc = crc32c(grain);
  std::mt19937_64 random(2);
  for (int turn = 0; turn < 2000; ++turn) {
    const std::size_t bit = random() % (kGrain * 8);
    grain[bit / 8] ^= std::byte{1} << (bit % 8);
    MA_INVARIANT(crc32c(grain) != crc);
    grain[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

void a_grain_is_compared_with_what_was_noted() {
  Checksums checksums(2, {});
  const std::vector<Extent> extents{{1, 3 * kGrain, 4 * kGrain}};
  checksums.take(extents);
  Bytes bytes(4 * kGrain, std::byte{7});
  std::uint64_t checked_bytes = 0;
  // Never written: anything may be there.
  MA_INVARIANT(!checksums.check(1, 3 * kGrain, bytes, &checked_bytes));
  MA_INVARIANT(checked_bytes == 0);
  checksums.note(1, 4 * kGrain, std::span(bytes).first(2 * kGrain));
  MA_INVARIANT(!checksums.check(1, 3 * kGrain, bytes, &checked_bytes));
  MA_INVARIANT(checked_bytes == 2 * kGrain);
  bytes[2 * kGrain + 5] ^= std::byte{1};  // of the second one noted
  const auto mismatch = checksums.check(1, 3 * kGrain, bytes, &checked_bytes);
  MA_INVARIANT(mismatch.has_value());
  MA_INVARIANT(mismatch->offset == 5 * kGrain);
  MA_INVARIANT(mismatch->found != mismatch->expected);
  checksums.forget(1, 5 * kGrain, kGrain);
  MA_INVARIANT(!checksums.check(1, 3 * kGrain, bytes, &checked_bytes));
}

void what_is_given_is_forgotten() {
  Checksums checksums(1, {});
  const std::vector<Extent> extents{{0, 0, kGrain}};
  const std::vector<Extent> other{{0, kGrain, kGrain}};
  Bytes bytes(kGrain, std::byte{1});
  checksums.take(other);  // keeps the page
  for (int turn = 0; turn < 3; ++turn) {
    checksums.take(extents);
    std::uint64_t checked_bytes = 0;
    MA_INVARIANT(!checksums.check(0, 0, bytes, &checked_bytes));
    MA_INVARIANT(checked_bytes == 0);
    checksums.note(0, 0, Bytes(kGrain, std::byte{9}));
    MA_INVARIANT(checksums.check(0, 0, bytes, &checked_bytes).has_value());
    checksums.give(extents);
  }
}

// Two stripes to a page, over ten pages of two volumes: ten pages, not forty.
void memory_follows_what_is_taken() {
  std::uint64_t asked_bytes = 0;
  Checksums checksums(2, [&asked_bytes](std::uint64_t nbytes) {
    asked_bytes += nbytes;
    return std::shared_ptr<std::byte>(new std::byte[nbytes], std::default_delete<std::byte[]>());
  });
  std::vector<Extent> extents;
  for (std::uint64_t page = 0; page < 5; ++page) {
    for (int volume = 0; volume < 2; ++volume) {
      for (std::uint64_t part = 0; part < 4; ++part) {
        extents.push_back({volume, page * kPageSpan + 2 * part * kGrain, kGrain});
      }
    }
  }
  for (int turn = 0; turn < 3; ++turn) {
    checksums.take(extents);
    MA_INVARIANT(asked_bytes == Checksums::kSlabBytes);
    checksums.give(extents);
  }
  checksums.provide(Checksums::kSlabBytes + 1);
  MA_INVARIANT(asked_bytes == 2 * Checksums::kSlabBytes);
  checksums.take(std::vector<Extent>{{0, 0, 32 * kPageSpan}});
  MA_INVARIANT(checksums.held_bytes() == asked_bytes);
  MA_INVARIANT(asked_bytes == 2 * Checksums::kSlabBytes);
}

void without_memory_nothing_is_taken() {
  bool refuses = false;
  Checksums checksums(1, [&refuses](std::uint64_t nbytes) {
    if (refuses) throw std::bad_alloc();
    return std::shared_ptr<std::byte>(new std::byte[nbytes], std::default_delete<std::byte[]>());
  });
  const std::vector<Extent> fitting{{0, 0, 16 * kPageSpan}};
  checksums.take(fitting);
  refuses = true;
  const std::vector<Extent> larger{{0, 15 * kPageSpan, kGrain}, {0, 16 * kPageSpan, kPageSpan}};
  checksums.give(std::vector<Extent>{{0, 15 * kPageSpan, kPageSpan}});
  checksums.take(std::vector<Extent>{{0, 15 * kPageSpan + kGrain, kPageSpan - kGrain}});
  bool thrown = false;
  try {
    checksums.take(larger);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  MA_INVARIANT(thrown);
  // Had the first of the two been taken, this would be too many.
  checksums.take(std::vector<Extent>{{0, 15 * kPageSpan, kGrain}});
  checksums.give(fitting);
}

void only_three_words_are_known() {
  MA_INVARIANT(parse_verify("off") == Verify::kOff);
  MA_INVARIANT(parse_verify("reads") == Verify::kReads);
  MA_INVARIANT(parse_verify("full") == Verify::kFull);
  bool thrown = false;
  try {
    parse_verify("writes");
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  MA_INVARIANT(thrown);
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::every_flipped_bit_is_found();
  memascend::a_grain_is_compared_with_what_was_noted();
  memascend::what_is_given_is_forgotten();
  memascend::memory_follows_what_is_taken();
  memascend::without_memory_nothing_is_taken();
  memascend::only_three_words_are_known();
  return 0;
}

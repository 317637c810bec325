// sources: csrc/base/free_space.cpp
//
// Free space against a model that keeps one mark per page: random takes, gives, marks, boundaries.
#include "base/free_space.hpp"

#include <algorithm>
#include <memory>
#include <random>
#include <string>

#include "support/expect.hpp"

using namespace memascend;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kPageCount = 64;
// What is known of each page: in use, free with memory behind it, free without.
constexpr char kUsed = 'u', kBacked = 'b', kUntouched = '-';

/// Length of the shortest run of one kind, or of any free kind (0), that holds `count` pages.
std::uint64_t shortest(const std::string& pages, std::uint64_t count, char kind) {
  std::uint64_t best = 0, length = 0;
  for (std::uint64_t page = 0; page <= kPageCount; ++page) {
    const bool fits = page < kPageCount && (kind != 0 ? pages[page] == kind : pages[page] != kUsed);
    if (fits) {
      ++length;
      continue;
    }
    if (length >= count && (best == 0 || length < best)) best = length;
    length = 0;
  }
  return best;
}

/// Length of the longest backed run.
std::uint64_t longest(const std::string& pages) {
  std::uint64_t count = kPageCount;
  while (count > 0 && shortest(pages, count, kBacked) == 0) --count;
  return count;
}

/// Length of the backed run that ends where page `end` begins.
std::uint64_t ending_at(const std::string& pages, std::uint64_t end) {
  if (end < kPageCount && pages[end] == kBacked) return 0;
  std::uint64_t count = 0;
  while (count < end && pages[end - 1 - count] == kBacked) ++count;
  return count;
}

std::uint64_t page_count(const std::optional<FreeRun>& run) {
  return run ? run->nbytes / kPage : 0;
}

void agrees_with_a_mark_per_page() {
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    FreeSpace space(kPageCount * kPage);
    std::string pages(kPageCount, kUntouched);
    for (int step = 0; step < 400; ++step) {
      const std::uint64_t first = random() % kPageCount;
      const char kind = pages[first];
      std::uint64_t count = 1 + random() % 6;
      while (first + count > kPageCount) --count;
      const std::string part = pages.substr(first, count);
      if (part == std::string(count, kUsed)) {
        space.give(first * kPage, count * kPage);
        pages.replace(first, count, count, kBacked);
      } else if (part == std::string(count, kind) && random() % 3 == 0) {
        const bool backed = kind == kUntouched;
        space.mark(first * kPage, count * kPage, backed);
        pages.replace(first, count, count, backed ? kBacked : kUntouched);
      } else if (part == std::string(count, kind)) {
        space.take(first * kPage, count * kPage);
        pages.replace(first, count, count, kUsed);
      }
      EXPECT(space.is_valid());
      EXPECT(space.is_taken(first * kPage, kPage) == (pages[first] == kUsed));
      const std::uint64_t wanted = 1 + random() % 8;
      EXPECT(page_count(space.best_backed(wanted * kPage)) == shortest(pages, wanted, kBacked));
      EXPECT(page_count(space.best_untouched(wanted * kPage)) ==
             shortest(pages, wanted, kUntouched));
      EXPECT(page_count(space.largest_backed()) == longest(pages));
      EXPECT(space.backed_bytes_before(wanted * kPage) == ending_at(pages, wanted) * kPage);
      EXPECT(page_count(space.best_any(wanted * kPage)) == shortest(pages, wanted, 0));
      const auto backed = std::count(pages.begin(), pages.end(), kBacked);
      EXPECT(space.backed_bytes() == static_cast<std::uint64_t>(backed) * kPage);
    }
  }
}

void no_backed_run_extends_over_a_boundary() {
  FreeSpace space(8 * kPage);
  space.add_boundary(4 * kPage);
  space.mark(0, 4 * kPage, true);
  space.mark(4 * kPage, 4 * kPage, true);
  EXPECT(page_count(space.best_backed(kPage)) == 4);
  EXPECT(!space.best_backed(5 * kPage));
  space.remove_boundary(4 * kPage);
  EXPECT(page_count(space.best_backed(5 * kPage)) == 8);
  EXPECT(space.is_valid());
}

void a_taken_run_is_given_back_once_at_the_latest_with_its_object() {
  const auto space = std::make_shared<FreeSpace>(8 * kPage);
  space->mark(0, 8 * kPage, true);
  {
    const TakenRun first(space, 0, 2 * kPage);
    TakenRun second(space, 2 * kPage, kPage);
    EXPECT(space->is_taken(0, 3 * kPage));
    second.release();
    EXPECT(space->free_bytes() == 6 * kPage);
    EXPECT(first.is_of(*space));
    EXPECT(!second.is_of(*space));
    const TakenRun third(space, 2 * kPage, kPage);
    second.release();
    EXPECT(space->is_taken(2 * kPage, kPage));
  }
  EXPECT(page_count(space->largest_backed()) == 8);
  EXPECT(space->is_valid());
}

}  // namespace

int main() {
  agrees_with_a_mark_per_page();
  no_backed_run_extends_over_a_boundary();
  a_taken_run_is_given_back_once_at_the_latest_with_its_object();
  return 0;
}

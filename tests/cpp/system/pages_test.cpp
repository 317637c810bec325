// sources: csrc/system/memory.cpp csrc/system/pages.cpp
//
// Pages: memory comes zeroed and resident, goes back, and what is refused is a note.
#include "system/pages.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "support/expect.hpp"

using namespace memascend;

namespace {

constexpr int kPopulateWrite = 23;
constexpr int kCollapse = 25;

/// While it lives no memory is found and no huge page made, but noted where one was to be.
struct Pretence {
  std::mutex mutex;
  std::vector<std::span<std::byte>> collapsed;
};
Pretence* pretence = nullptr;

}  // namespace

/// Stands before libc's.
extern "C" int madvise(void* address, std::size_t nbytes, int advice) noexcept {
  if (pretence != nullptr && advice == kPopulateWrite) return 0;
  if (pretence != nullptr && advice == kCollapse) {
    const std::lock_guard lock(pretence->mutex);
    pretence->collapsed.emplace_back(static_cast<std::byte*>(address), nbytes);
    return 0;
  }
  return static_cast<int>(syscall(SYS_madvise, address, nbytes, advice));
}

namespace {

constexpr std::uint64_t kRangeBytes = 8 * kHugePageBytes;

PageOptions plain() {
  PageOptions options;
  options.huge_pages = HugePages::kOff;
  options.lock = false;
  return options;
}

void memory_comes_zeroed_and_resident_and_goes_back() {
  AddressRange range(kRangeBytes, kRangeBytes);
  Notes notes;
  const std::span<std::byte> piece(range.base() + kPageBytes, 64 * kPageBytes);
  EXPECT(measure_pages(piece, notes).resident_bytes == 0);
  PageOptions options = plain();
  EXPECT(back_pages(piece, options, notes) == Backing::kPages);
  // qemu takes MADV_POPULATE_WRITE for advice, and does nothing.
  EXPECT(is_emulated() || measure_pages(piece, notes).resident_bytes == piece.size());
  EXPECT(
      std::all_of(piece.begin(), piece.end(), [](std::byte byte) { return byte == std::byte{}; }));
  std::fill(piece.begin(), piece.end(), std::byte{7});
  EXPECT(discard_pages(piece, notes));
  EXPECT(measure_pages(piece, notes).resident_bytes == 0);
  EXPECT(notes.list().empty());
}

void huge_pages_are_made_a_part_at_a_time_by_all_threads_until_their_time_is_over() {
  constexpr std::uint64_t kBytes = 5 * kCollapseBytes / 2;
  AddressRange range(kBytes, kBytes);
  const std::span<std::byte> piece(range.base() + kPageBytes, kBytes - 2 * kPageBytes);
  PageOptions options = plain();
  options.huge_pages = HugePages::kTransparent;
  options.prefault_threads = 2;
  for (const bool in_time : {true, false}) {
    Pretence made;
    pretence = &made;
    options.collapse_time = in_time ? std::chrono::hours(1) : std::chrono::hours(0);
    Notes notes;
    back_pages(piece, options, notes);
    pretence = nullptr;
    std::uint64_t nbytes = 0;
    for (const std::span<std::byte> part : made.collapsed) {
      EXPECT(part.size() <= kCollapseBytes);
      nbytes += part.size();
    }
    EXPECT(nbytes == (in_time ? kBytes - 2 * kHugePageBytes : 0));
    EXPECT(options.collapse_time <= std::chrono::hours(1));
    const auto is_about_time = [](const std::string& note) {
      return note.find("fragmented. fix: ") != std::string::npos;
    };
    EXPECT(std::ranges::count_if(notes.list(), is_about_time) == (in_time ? 0 : 1));
    EXPECT(mprotect(range.base(), kBytes, PROT_NONE) == 0);
  }
}

void a_piece_within_one_huge_page_is_left_small() {
  AddressRange range(kRangeBytes, kRangeBytes);
  PageOptions options = plain();
  options.huge_pages = HugePages::kTransparent;
  Pretence made;
  pretence = &made;
  Notes notes;
  for (const std::uint64_t begin : {kPageBytes, kHugePageBytes}) {
    back_pages({range.base() + begin, 64 * kPageBytes}, options, notes);
  }
  pretence = nullptr;
  EXPECT(made.collapsed.empty());
}

void a_range_smaller_than_asked_is_no_smaller_than_the_least() {
  if (is_emulated()) return;  // qemu keeps a record of every page of a range
  bool refused = false;
  try {
    AddressRange range(std::uint64_t{1} << 62, std::uint64_t{1} << 61);
  } catch (const HostMemoryError& error) {
    refused = error.requested_bytes >= std::uint64_t{1} << 61 && error.limit_bytes == 0;
  }
  EXPECT(refused);
  AddressRange halved(std::uint64_t{1} << 62, kRangeBytes);
  EXPECT(halved.nbytes() >= kRangeBytes && halved.nbytes() < std::uint64_t{1} << 62);
}

// In a child, since a limit cannot be raised again. Not under a sanitizer: there mlock() does
// nothing and reports success.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void a_lock_that_is_refused_is_one_note() {
  const pid_t child = ::fork();
  EXPECT(child >= 0);
  if (child == 0) {
    EXPECT(::setgid(65534) == 0 || ::getuid() != 0);
    EXPECT(::setuid(65534) == 0 || ::getuid() != 0);
    const rlimit none{kPageBytes, kPageBytes};
    EXPECT(::setrlimit(RLIMIT_MEMLOCK, &none) == 0);
    AddressRange range(kRangeBytes, kRangeBytes);
    Notes notes;
    const std::span<std::byte> piece(range.base(), 64 * kPageBytes);
    PageOptions options = plain();
    back_pages(piece, options, notes);
    EXPECT(!lock_pages(piece, notes));
    EXPECT(!lock_pages(piece, notes));
    EXPECT(notes.list().size() == 1);
    EXPECT(measure_pages(piece, notes).locked_bytes == 0);
    std::_Exit(0);
  }
  int status = 0;
  EXPECT(::waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace

void larger_pages_are_refused_before_anything_is_mapped() {
  require_page_bytes(kPageBytes);
  for (const std::uint64_t nbytes : {16384u, 65536u}) {
    std::string message;
    try {
      require_page_bytes(nbytes);
    } catch (const HostMemoryError& error) {
      message = error.what();
    }
    EXPECT(message.find(std::to_string(nbytes)) != std::string::npos);
    EXPECT(message.find("fix: a kernel") != std::string::npos);
  }
}

int main() {
  larger_pages_are_refused_before_anything_is_mapped();
  memory_comes_zeroed_and_resident_and_goes_back();
  huge_pages_are_made_a_part_at_a_time_by_all_threads_until_their_time_is_over();
  a_piece_within_one_huge_page_is_left_small();
  a_range_smaller_than_asked_is_no_smaller_than_the_least();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  a_lock_that_is_refused_is_one_note();
#endif
  return 0;
}

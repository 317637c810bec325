// sources: csrc/system/memory.cpp csrc/system/pages.cpp
//
// Pages: memory comes zeroed and resident, goes back, and what is refused is a note.
#include "system/pages.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "support/expect.hpp"

using namespace memascend;

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
  EXPECT(back_pages(piece, plain(), notes) == Backing::kPages);
  // qemu takes MADV_POPULATE_WRITE for advice, and does nothing.
  EXPECT(is_emulated() || measure_pages(piece, notes).resident_bytes == piece.size());
  EXPECT(
      std::all_of(piece.begin(), piece.end(), [](std::byte byte) { return byte == std::byte{}; }));
  std::fill(piece.begin(), piece.end(), std::byte{7});
  EXPECT(discard_pages(piece, notes));
  EXPECT(measure_pages(piece, notes).resident_bytes == 0);
  EXPECT(notes.list().empty());
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
    back_pages(piece, plain(), notes);
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
  a_range_smaller_than_asked_is_no_smaller_than_the_least();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  a_lock_that_is_refused_is_one_note();
#endif
  return 0;
}

// sources: csrc/base/*.cpp csrc/memory/*.cpp csrc/system/*.cpp
// Arena: memory appears on commit, is measured, goes back on decommit, and survives a fork.
#include "memory/arena.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "support/expect.hpp"
#include "system/memory.hpp"

using namespace memascend;

namespace {

constexpr std::uint64_t kMib = 1024 * 1024;

ArenaOptions small_range() {
  ArenaOptions options;
  options.range_bytes = 256 * kMib;
  options.pages.prefault_threads = 2;
  options.pages.huge_pages = HugePages::kTransparent;  // explicit ones never go back
  return options;
}

void committed_memory_is_zero_resident_and_contiguous() {
  Arena arena(small_range());
  EXPECT(reinterpret_cast<std::uintptr_t>(arena.base()) % kHugePageBytes == 0);
  arena.commit(0, 64 * kMib);
  arena.commit(64 * kMib, 4 * kMib);
  EXPECT(arena.reserved_bytes() == 68 * kMib);
  for (std::uint64_t offset = 0; offset < 68 * kMib; offset += 511) {
    EXPECT(arena.base()[offset] == std::byte{0});
  }
  std::memset(arena.base() + 63 * kMib, 7, 2 * kMib);  // over the seam of two commits
  EXPECT(arena.report().resident_bytes >= 68 * kMib);
}

void decommitted_memory_leaves_the_process_and_comes_back_zero() {
  Arena arena(small_range());
  arena.commit(0, 8 * kMib);
  std::memset(arena.base(), 1, 8 * kMib);
  const std::uint64_t hole_begin = kMib + kPageBytes;
  EXPECT(arena.decommit(hole_begin, 3 * kMib));
  const ArenaReport report = arena.report();
  EXPECT(report.reserved_bytes == 5 * kMib);
  if (report.resident_bytes != 0) EXPECT(report.resident_bytes == 5 * kMib);
  EXPECT(arena.base()[hole_begin - 1] == std::byte{1});
  EXPECT(arena.base()[hole_begin + 3 * kMib] == std::byte{1});
  arena.commit(hole_begin, 3 * kMib);
  EXPECT(arena.base()[hole_begin] == std::byte{0});
}

void more_memory_than_there_is_throws_and_changes_nothing() {
  const std::uint64_t available_bytes = available_memory_bytes();
  if (available_bytes == 0) return;
  ArenaOptions options = small_range();
  options.range_bytes = 4 * available_bytes;
  Arena arena(options);
  if (arena.range_bytes() < 3 * available_bytes) return;  // an address space limit
  bool thrown = false;
  try {
    arena.commit(0, available_bytes / kHugePageBytes * 2 * kHugePageBytes);
  } catch (const HostMemoryError& error) {
    thrown = error.requested_bytes >= available_bytes;
  }
  EXPECT(thrown);
  EXPECT(arena.reserved_bytes() == 0);
  arena.commit(0, kMib);
}

void a_forked_child_that_destroys_the_arena_leaves_its_own_memory_alone() {
  auto arena = std::make_unique<Arena>(small_range());
  arena->commit(0, 4 * kMib);
  arena->base()[0] = std::byte{42};
  const pid_t child = fork();
  if (child == 0) {
    arena.reset();
    _exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status));
  EXPECT(WEXITSTATUS(status) == 0);
  EXPECT(arena->base()[0] == std::byte{42});
}

void a_note_is_kept_once() {
  Notes notes;
  notes.add("no lock");
  notes.add("no huge pages");
  notes.add("no lock");
  EXPECT(notes.list().size() == 2);
}

}  // namespace

int main() {
  committed_memory_is_zero_resident_and_contiguous();
  decommitted_memory_leaves_the_process_and_comes_back_zero();
  more_memory_than_there_is_throws_and_changes_nothing();
  a_forked_child_that_destroys_the_arena_leaves_its_own_memory_alone();
  a_note_is_kept_once();
}

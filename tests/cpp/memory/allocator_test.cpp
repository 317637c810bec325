// sources: csrc/base/*.cpp csrc/memory/*.cpp csrc/system/*.cpp
// Allocator: threads that allocate, write, check and free at once; limits; lifetime.
#include "memory/allocator.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/expect.hpp"

using namespace memascend;

namespace {

constexpr std::uint64_t kMib = 1024 * 1024;

AllocatorOptions small_range() {
  AllocatorOptions options;
  options.arena.range_bytes = 512 * kMib;
  options.arena.pages.prefault_threads = 1;
  return options;
}

bool is_filled(const Block& block, std::byte pattern) {
  for (std::uint64_t index = 0; index < block.nbytes(); index += 97) {
    if (block.address()[index] != pattern) return false;
  }
  return block.address()[block.nbytes() - 1] == pattern;
}

void threads_never_see_each_others_bytes() {
  constexpr int kThreadCount = 4;
  constexpr int kStepCount = 300;
  constexpr std::size_t kLiveMax = 8;
  const auto allocator = Allocator::create(small_range());
  std::atomic<int> damaged_count{0};
  auto work = [&](int thread_index) {
    std::mt19937 random(static_cast<unsigned>(thread_index));
    std::vector<std::pair<std::unique_ptr<Block>, std::byte>> live;
    for (int step = 0; step < kStepCount; ++step) {
      if (live.size() == kLiveMax || (!live.empty() && random() % 2 == 0)) {
        const std::size_t chosen = random() % live.size();
        if (!is_filled(*live[chosen].first, live[chosen].second)) ++damaged_count;
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(chosen));
      } else {
        const std::uint64_t nbytes = 1 + random() % (random() % 8 == 0 ? 3 * kMib : 64 * 1024);
        auto block = allocator->allocate(nbytes, thread_index % 2 == 0 ? "even" : "odd", false);
        const auto pattern = static_cast<std::byte>(random());
        std::memset(block->address(), static_cast<int>(pattern), nbytes);
        live.emplace_back(std::move(block), pattern);
      }
      if (step % 50 == 0) allocator->trim();
      if (step % 60 == 0) EXPECT(allocator->is_valid());
    }
  };
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreadCount; ++index) threads.emplace_back(work, index);
  for (std::thread& thread : threads) thread.join();
  EXPECT(damaged_count == 0);
  EXPECT(allocator->is_valid());
  EXPECT(allocator->stats().block_count == 0);
  EXPECT(allocator->components().at("even").live_bytes == 0);
}

void free_neighbours_merge_into_one_hole() {
  const auto allocator = Allocator::create(small_range());
  std::vector<std::unique_ptr<Block>> blocks;
  for (int index = 0; index < 8; ++index)
    blocks.push_back(allocator->allocate(kMib, "test", false));
  const std::byte* first = blocks[2]->address();
  blocks[2].reset();
  blocks[4].reset();
  blocks[3].reset();
  const auto merged = allocator->allocate(3 * kMib, "test", false);
  EXPECT(merged->address() == first);
  EXPECT(allocator->stats().reserved_bytes == 8 * kMib);
}

void the_smallest_sufficient_hole_is_taken() {
  const auto allocator = Allocator::create(small_range());
  auto wide = allocator->allocate(4 * kPageBytes, "test", false);
  const auto wall = allocator->allocate(1, "test", false);
  auto narrow = allocator->allocate(2 * kPageBytes, "test", false);
  const auto end = allocator->allocate(1, "test", false);
  const std::byte* narrow_address = narrow->address();
  wide.reset();
  narrow.reset();
  EXPECT(allocator->allocate(kPageBytes + 1, "test", false)->address() == narrow_address);
}

void a_block_outlives_its_allocator() {
  auto allocator = Allocator::create(small_range());
  const auto block = allocator->allocate(100, "test", true);
  allocator.reset();
  std::memset(block->address(), 5, 100);
  EXPECT(is_filled(*block, std::byte{5}));
}

void beyond_the_limit_nothing_changes() {
  AllocatorOptions options = small_range();
  options.limit_bytes = 3 * kMib + 5000;  // ragged: the tail must shrink to fit
  const auto allocator = Allocator::create(options);
  const auto block = allocator->allocate(3 * kMib, "weights", false);
  EXPECT(allocator->stats().reserved_bytes <= options.limit_bytes);
  bool thrown = false;
  try {
    allocator->allocate(kMib, "gradients", false);
  } catch (const HostMemoryError& error) {
    const std::string what = error.what();
    thrown = error.limit_bytes == 3 * kMib + 4096 && error.requested_bytes >= kMib - 4096;
    EXPECT(what.find("gradients") != std::string::npos);
    EXPECT(what.find("weights 3.0 MiB") != std::string::npos);
  }
  EXPECT(thrown);
  EXPECT(allocator->is_valid());
  EXPECT(!allocator->components().contains("gradients"));
  EXPECT(allocator->allocate(4096, "gradients", false) != nullptr);
}

template <typename Call>
bool is_refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return std::string(error.what()).find("belongs to the process") != std::string::npos;
  }
  return false;
}

// The child has nothing mapped where the parent's memory is: touching it there would be SIGSEGV.
void a_forked_child_is_refused_and_frees_nothing() {
  auto allocator = Allocator::create(small_range());
  auto block = allocator->allocate(kMib, "test", false);
  allocator->allocate(8 * kMib, "test", false);  // a hole with memory behind it
  block->address()[0] = std::byte{7};
  const pid_t child = fork();
  if (child == 0) {
    bool refused = is_refused([&] { allocator->allocate(2 * kMib, "test", true); });
    refused = is_refused([&] { allocator->trim(); }) && refused;
    refused = is_refused([&] { allocator->stats(); }) && refused;
    refused = is_refused([&] { allocator->notes(); }) && refused;
    block.reset();
    allocator.reset();
    _exit(refused ? 0 : 2);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status));
  EXPECT(WEXITSTATUS(status) == 0);
  EXPECT(block->address()[0] == std::byte{7});
  EXPECT(allocator->is_valid());
}

}  // namespace

int main() {
  threads_never_see_each_others_bytes();
  free_neighbours_merge_into_one_hole();
  the_smallest_sufficient_hole_is_taken();
  a_block_outlives_its_allocator();
  beyond_the_limit_nothing_changes();
  a_forked_child_is_refused_and_frees_nothing();
}

// sources: csrc/base/*.cpp csrc/memory/*.cpp csrc/system/*.cpp
// CudaDriver, and the pieces of an allocator that registers, against a stand-in for libcuda that is
// built here (fake_cuda.cpp): no device is needed.
#include "system/cuda_driver.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "memory/allocator.hpp"
#include "support/expect.hpp"

using namespace memascend;

namespace {

bool keeps_pages = false;

}  // namespace

/// Stands before libc's, so that a test can have the kernel refuse to take memory back.
extern "C" int madvise(void* address, std::size_t nbytes, int advice) {
  if (keeps_pages && advice == MADV_DONTNEED) {
    errno = ENOMEM;
    return -1;
  }
  return static_cast<int>(syscall(SYS_madvise, address, nbytes, advice));
}

namespace {

constexpr std::uint64_t kMib = 1024 * 1024;

struct StandIn {
  std::string path;
  void (*reset)(int, int) = nullptr;
  int (*live)() = nullptr;
  int (*depth)() = nullptr;
  void (*give_context)() = nullptr;
  void (*refuse_unregister)(int) = nullptr;
  void (*begin_copy)() = nullptr;
  int (*unregistered_busy_count)() = nullptr;
  void (*refuse_unregister_after)(int) = nullptr;
};

StandIn build_stand_in(const std::string& directory) {
  StandIn stand_in;
  std::string source = __FILE__;
  source = source.substr(0, source.rfind('/')) + "/../support/fake_cuda.cpp";
  stand_in.path = directory + "/libfakecuda.so";
  const char* compiler = std::getenv("CXX");  // of the machine that this program is for
  const std::string command = std::string(compiler != nullptr ? compiler : "c++") +
                              " -std=c++17 -shared -fPIC -o '" + stand_in.path + "' '" + source +
                              "'";
  if (std::system(command.c_str()) != 0) {
    std::puts("skipped: no c++ on the path to build the stand-in for libcuda");
    std::exit(77);
  }
  void* library = dlopen(stand_in.path.c_str(), RTLD_NOW);
  EXPECT(library != nullptr);
  const auto look_up = [library](const char* name, auto& target) {
    target = reinterpret_cast<std::remove_reference_t<decltype(target)>>(dlsym(library, name));
    EXPECT(target != nullptr);
  };
  look_up("fake_reset", stand_in.reset);
  look_up("fake_live", stand_in.live);
  look_up("fake_depth", stand_in.depth);
  look_up("fake_give_context", stand_in.give_context);
  look_up("fake_refuse_unregister", stand_in.refuse_unregister);
  look_up("fake_begin_copy", stand_in.begin_copy);
  look_up("fake_unregistered_busy_count", stand_in.unregistered_busy_count);
  look_up("fake_refuse_unregister_after", stand_in.refuse_unregister_after);
  return stand_in;
}

AllocatorOptions registering(const StandIn& stand_in) {
  AllocatorOptions options;
  options.arena.range_bytes = 256 * kMib;
  options.arena.pages.lock = false;
  options.arena.pages.huge_pages = HugePages::kTransparent;  // explicit ones never go back
  options.arena.register_device = true;
  options.arena.cuda_library = stand_in.path;
  return options;
}

void a_missing_library_is_a_reason_not_an_error() {
  std::string reason;
  EXPECT(CudaDriver::open("libnothere.so.1", reason) == nullptr);
  EXPECT(reason.find("libnothere") != std::string::npos);
  EXPECT(CudaDriver::open("libc.so.6", reason) == nullptr);
  EXPECT(reason.find("cuMemHostRegister") != std::string::npos);
}

void without_a_context_registering_fails_until_there_is_one(const StandIn& stand_in) {
  stand_in.reset(0, 0);
  std::string reason;
  const std::unique_ptr<CudaDriver> driver = CudaDriver::open(stand_in.path, reason);
  EXPECT(driver != nullptr);
  std::vector<std::byte> memory(kPageBytes);
  EXPECT(driver->register_memory(memory).find("context") != std::string::npos);
  EXPECT(stand_in.live() == 0);
  stand_in.give_context();
  EXPECT(driver->register_memory(memory).empty());
  EXPECT(stand_in.live() == 1);
  EXPECT(driver->try_unregister_memory(memory).empty());
  EXPECT(stand_in.live() == 0);
  EXPECT(stand_in.depth() == 0);
}

void one_range_is_one_registration_however_large(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  std::string reason;
  const std::unique_ptr<CudaDriver> driver = CudaDriver::open(stand_in.path, reason);
  // No memory is there, and the stand-in touches none.
  const std::span<std::byte> range(reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44),
                                   std::uint64_t{200} << 30);
  EXPECT(driver->register_memory(range).empty());
  EXPECT(stand_in.live() == 1);
  driver->unregister_memory(range);
  EXPECT(stand_in.live() == 0);
}

void memory_that_was_refused_works_and_is_tried_again(const StandIn& stand_in) {
  stand_in.reset(1, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  const auto block = allocator->allocate(16 * kMib, "test", false);
  const ArenaReport report = allocator->report();
  EXPECT(stand_in.live() == 0);
  EXPECT(stand_in.depth() == 0);
  EXPECT(report.registered_bytes == 0);
  EXPECT(report.wants_registration);
  EXPECT(report.notes.size() >= 1);
  EXPECT(report.notes.back().find("out of memory") != std::string::npos);
  block->address()[16 * kMib - 1] = std::byte{1};
  const auto next = allocator->allocate(2 * kMib, "test", false);
  EXPECT(stand_in.live() == 2);
  EXPECT(allocator->stats().registered_bytes == 18 * kMib);
  EXPECT(allocator->is_valid());
}

void registrations_end_with_the_last_block_not_with_the_allocator(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  auto allocator = Allocator::create(registering(stand_in));
  auto block = allocator->allocate(9 * kMib, "test", false);
  EXPECT(stand_in.live() == 1);
  EXPECT(allocator->report().registered_bytes == 10 * kMib);
  allocator.reset();
  EXPECT(stand_in.live() == 1);
  block.reset();
  EXPECT(stand_in.live() == 0);
}

void the_last_block_waits_for_copies_in_flight(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  auto block = Allocator::create(registering(stand_in))->allocate(kMib, "test", false);
  stand_in.begin_copy();
  block.reset();
  EXPECT(stand_in.live() == 0);
  EXPECT(stand_in.unregistered_busy_count() == 0);
  EXPECT(stand_in.depth() == 0);
}

void a_forked_child_leaves_the_registrations_alone(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  auto allocator = Allocator::create(registering(stand_in));
  auto block = allocator->allocate(kMib, "test", false);
  std::string reason;
  const std::unique_ptr<CudaDriver> driver = CudaDriver::open(stand_in.path, reason);
  std::vector<std::byte> memory(kPageBytes);
  EXPECT(driver->register_memory(memory).empty());
  const pid_t child = fork();
  if (child == 0) {
    block.reset();
    allocator.reset();
    driver->unregister_memory(memory);
    _exit(stand_in.live());  // the child's copy of the stand-in
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status));
  EXPECT(WEXITSTATUS(status) == 2);
  driver->unregister_memory(memory);
  EXPECT(stand_in.live() == 1);
}

void no_block_lies_across_two_registrations(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  auto first = allocator->allocate(2 * kMib, "test", false);
  auto second = allocator->allocate(2 * kMib, "test", false);
  EXPECT(second->address() == first->address() + 2 * kMib);
  const std::byte* base = first->address();
  first.reset();
  second.reset();
  // 4 MiB are free side by side, but in two pieces: a 3 MiB block needs a piece of its own.
  const auto third = allocator->allocate(3 * kMib, "test", false);
  EXPECT(third->address() == base + 4 * kMib);
  EXPECT(allocator->is_valid());
}

void a_free_piece_goes_back_and_its_addresses_serve_again(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  auto first = allocator->allocate(2 * kMib, "test", false);
  auto second = allocator->allocate(3 * kMib, "test", false);  // a piece of 4 MiB
  const auto third = allocator->allocate(2 * kMib, "test", false);
  const std::byte* base = first->address();
  std::memset(first->address(), 1, 2 * kMib);
  const auto part = allocator->allocate(kMib, "test", false);  // in the tail of the second
  first.reset();
  second.reset();
  allocator->trim();
  EXPECT(stand_in.live() == 2);  // a piece with a block in it stays whole
  EXPECT(allocator->stats().reserved_bytes == 6 * kMib);
  EXPECT(allocator->report().registered_bytes == 6 * kMib);
  EXPECT(allocator->is_valid());
  const auto again = allocator->allocate(kPageBytes, "test", false);
  EXPECT(again->address() == base + 2 * kMib);  // the hole in the second piece fits best
  const auto rest = allocator->allocate(3 * kMib - kPageBytes, "test", false);
  EXPECT(rest->address() == again->address() + kPageBytes);
  const auto fresh = allocator->allocate(kMib, "test", true);
  EXPECT(fresh->address() == base);  // in the hole that the first piece left
  EXPECT(fresh->address()[0] == std::byte{0});
  EXPECT(allocator->stats().reserved_bytes == 8 * kMib);
  EXPECT(third->address() == base + 6 * kMib);
  EXPECT(allocator->is_valid());
}

void neighbouring_pieces_that_went_back_make_one_hole(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  std::vector<std::unique_ptr<Block>> blocks;
  for (int index = 0; index < 4; ++index) {
    blocks.push_back(allocator->allocate(2 * kMib, "test", false));
    std::memset(blocks.back()->address(), 7, 2 * kMib);
  }
  const std::byte* base = blocks.front()->address();
  blocks.erase(blocks.begin(), blocks.begin() + 3);
  allocator->trim();
  const auto wide = allocator->allocate(6 * kMib, "test", false);
  EXPECT(wide->address() == base);
  for (std::uint64_t index = 0; index < 6 * kMib; index += 511) {
    EXPECT(wide->address()[index] == std::byte{0});
  }
  EXPECT(allocator->is_valid());
}

void a_limit_refuses_only_after_free_pieces_have_gone_back(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  AllocatorOptions options = registering(stand_in);
  options.limit_bytes = 8 * kMib;
  const auto allocator = Allocator::create(options);
  auto first = allocator->allocate(4 * kMib, "test", false);
  auto second = allocator->allocate(4 * kMib, "test", false);
  first.reset();
  auto third = allocator->allocate(3 * kMib, "test", false);  // a part of the first's piece
  third.reset();
  second.reset();
  const auto whole = allocator->allocate(8 * kMib, "test", false);
  EXPECT(allocator->stats().reserved_bytes == 8 * kMib);
  bool thrown = false;
  try {
    allocator->allocate(kPageBytes, "test", false);
  } catch (const HostMemoryError& error) {
    thrown = error.limit_bytes == options.limit_bytes;
  }
  EXPECT(thrown);
  EXPECT(allocator->is_valid());
}

void under_a_limit_pieces_have_no_tail(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  AllocatorOptions options = registering(stand_in);
  options.limit_bytes = 16 * kMib;
  const auto allocator = Allocator::create(options);
  const auto first = allocator->allocate(3 * kMib + 1, "test", false);
  EXPECT(allocator->stats().reserved_bytes == 3 * kMib + kPageBytes);
  const auto second = allocator->allocate(5 * kMib, "test", false);
  EXPECT(allocator->stats().reserved_bytes == 8 * kMib + kPageBytes);
  const auto third = allocator->allocate(1, "test", false);
  EXPECT(allocator->stats().reserved_bytes == 8 * kMib + 2 * kPageBytes);
  const auto start = reinterpret_cast<std::uintptr_t>(second->address());
  EXPECT(start % kHugePageBytes == 0);
  const ArenaReport report = allocator->report();
  if (report.resident_bytes != 0) EXPECT(report.resident_bytes == report.reserved_bytes);
  EXPECT(allocator->is_valid());
}

void a_piece_that_the_driver_keeps_stays_with_a_note(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  auto block = allocator->allocate(10 * kMib, "test", false);
  std::byte* address = block->address();
  block.reset();
  stand_in.refuse_unregister_after(0);
  allocator->trim();
  EXPECT(stand_in.live() == 1);
  EXPECT(stand_in.depth() == 0);
  ArenaReport report = allocator->report();
  EXPECT(report.reserved_bytes == 10 * kMib);
  EXPECT(report.registered_bytes == 10 * kMib);
  EXPECT(report.notes.back().find("illegal address") != std::string::npos);
  EXPECT(allocator->is_valid());
  block = allocator->allocate(10 * kMib, "test", false);
  EXPECT(block->address() == address);
  block.reset();
  allocator->trim();  // nothing refuses now
  EXPECT(allocator->stats().reserved_bytes == 0);
  EXPECT(stand_in.live() == 0);
}

void a_piece_that_the_kernel_keeps_is_registered_again_with_a_note(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  allocator->allocate(4 * kMib, "test", false);
  keeps_pages = true;
  allocator->trim();
  keeps_pages = false;
  const ArenaReport report = allocator->report();
  EXPECT(report.reserved_bytes == 4 * kMib);
  EXPECT(report.registered_bytes == 4 * kMib);
  EXPECT(stand_in.live() == 1);
  EXPECT(report.notes.back().find("could not be given back") != std::string::npos);
  EXPECT(allocator->is_valid());
}

void a_piece_that_was_refused_registration_goes_back_too(const StandIn& stand_in) {
  stand_in.reset(1, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  allocator->allocate(4 * kMib, "test", false);
  EXPECT(stand_in.live() == 0);
  allocator->trim();
  EXPECT(allocator->stats().reserved_bytes == 0);
  EXPECT(allocator->is_valid());
}

}  // namespace

int main() {
  char directory[] = "/tmp/memascend_cuda_XXXXXX";
  EXPECT(mkdtemp(directory) != nullptr);
  const StandIn stand_in = build_stand_in(directory);
  a_missing_library_is_a_reason_not_an_error();
  without_a_context_registering_fails_until_there_is_one(stand_in);
  one_range_is_one_registration_however_large(stand_in);
  memory_that_was_refused_works_and_is_tried_again(stand_in);
  registrations_end_with_the_last_block_not_with_the_allocator(stand_in);
  the_last_block_waits_for_copies_in_flight(stand_in);
  a_forked_child_leaves_the_registrations_alone(stand_in);
  no_block_lies_across_two_registrations(stand_in);
  a_free_piece_goes_back_and_its_addresses_serve_again(stand_in);
  neighbouring_pieces_that_went_back_make_one_hole(stand_in);
  a_limit_refuses_only_after_free_pieces_have_gone_back(stand_in);
  under_a_limit_pieces_have_no_tail(stand_in);
  a_piece_that_the_driver_keeps_stays_with_a_note(stand_in);
  a_piece_that_the_kernel_keeps_is_registered_again_with_a_note(stand_in);
  a_piece_that_was_refused_registration_goes_back_too(stand_in);
  unlink(stand_in.path.c_str());
  rmdir(directory);
}

// sources: csrc/memory/*.cpp csrc/os/pages.cpp csrc/os/cuda_driver.cpp
// CudaDriver against a stand-in for libcuda, built here: no device is needed. The stand-in counts
// live registrations and fails at a chosen one.
#include "os/cuda_driver.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "expect.hpp"
#include "memory/allocator.hpp"

using namespace memascend;

namespace {

constexpr std::uint64_t kMib = 1024 * 1024;

constexpr const char* kStandIn = R"(
#include <map>
#include <cstddef>
std::map<char*, std::size_t> live;
int calls = 0, fail_at = 0, depth = 0, has_context = 1;
extern "C" {
int cuMemHostRegister_v2(void* p, std::size_t n, unsigned) {
  if (depth == 0) return 201;
  if (++calls == fail_at) return 2;
  char* start = static_cast<char*>(p);
  for (auto& [other, size] : live) if (start < other + size && other < start + n) return 712;
  live[start] = n;
  return 0;
}
int cuMemHostUnregister(void* p) { return live.erase(static_cast<char*>(p)) == 1 ? 0 : 713; }
int cuCtxGetCurrent(void** c) { *c = has_context ? &live : nullptr; return 0; }
int cuCtxPushCurrent_v2(void*) { ++depth; return 0; }
int cuCtxPopCurrent_v2(void**) { --depth; return 0; }
int cuGetErrorString(int code, const char** s) { *s = code == 2 ? "out of memory" : "?"; return 0; }
void fake_reset(int n, int context) { live.clear(); calls = 0; fail_at = n; has_context = context; }
int fake_live() { return static_cast<int>(live.size()); }
int fake_depth() { return depth; }
}
)";

struct StandIn {
  std::string path;
  void (*reset)(int, int) = nullptr;
  int (*live)() = nullptr;
  int (*depth)() = nullptr;
};

StandIn build_stand_in(const std::string& directory) {
  StandIn stand_in;
  const std::string source = directory + "/fake_cuda.cpp";
  stand_in.path = directory + "/libfakecuda.so";
  std::ofstream(source) << kStandIn;
  const std::string command =
      "c++ -std=c++17 -shared -fPIC -o '" + stand_in.path + "' '" + source + "'";
  if (std::system(command.c_str()) != 0) {
    std::puts("skipped: no c++ on the path to build the stand-in for libcuda");
    std::exit(77);
  }
  void* library = dlopen(stand_in.path.c_str(), RTLD_NOW);
  EXPECT(library != nullptr);
  stand_in.reset = reinterpret_cast<void (*)(int, int)>(dlsym(library, "fake_reset"));
  stand_in.live = reinterpret_cast<int (*)()>(dlsym(library, "fake_live"));
  stand_in.depth = reinterpret_cast<int (*)()>(dlsym(library, "fake_depth"));
  return stand_in;
}

AllocatorOptions registering(const StandIn& stand_in) {
  AllocatorOptions options;
  options.arena.range_bytes = 256 * kMib;
  options.arena.pages.lock = false;
  options.arena.register_device = true;
  options.arena.cuda_library = stand_in.path;
  options.arena.registration_bytes_max = 4 * kMib;
  return options;
}

void a_missing_library_or_context_is_a_reason_not_an_error(const StandIn& stand_in) {
  std::string reason;
  EXPECT(CudaDriver::open("libnothere.so.1", kMib, reason) == nullptr);
  EXPECT(reason.find("libnothere") != std::string::npos);
  EXPECT(CudaDriver::open("libc.so.6", kMib, reason) == nullptr);
  EXPECT(reason.find("cuMemHostRegister") != std::string::npos);
  stand_in.reset(0, 0);
  EXPECT(CudaDriver::open(stand_in.path, kMib, reason) == nullptr);
  EXPECT(reason.find("context") != std::string::npos);
}

void a_failure_at_the_third_chunk_takes_the_first_two_back(const StandIn& stand_in) {
  stand_in.reset(3, 1);
  const auto allocator = Allocator::create(registering(stand_in));
  const auto block = allocator->allocate(16 * kMib, "test", false);
  const ArenaReport report = allocator->report();
  EXPECT(stand_in.live() == 0);
  EXPECT(stand_in.depth() == 0);
  EXPECT(report.registered_bytes == 0);
  EXPECT(report.notes.size() >= 1);
  EXPECT(report.notes.back().find("out of memory") != std::string::npos);
  block->address()[16 * kMib - 1] = std::byte{1};  // the memory itself works
}

void registrations_end_with_the_last_block_not_with_the_allocator(const StandIn& stand_in) {
  stand_in.reset(0, 1);
  auto allocator = Allocator::create(registering(stand_in));
  auto block = allocator->allocate(9 * kMib, "test", false);
  EXPECT(stand_in.live() == 3);  // 10 MiB after rounding, in chunks of 4
  EXPECT(allocator->report().registered_bytes == 10 * kMib);
  allocator.reset();
  EXPECT(stand_in.live() == 3);
  block.reset();
  EXPECT(stand_in.live() == 0);
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
  allocator->trim();  // registered memory stays
  EXPECT(allocator->stats().reserved_bytes == 8 * kMib);
  EXPECT(allocator->is_valid());
}

}  // namespace

int main() {
  char directory[] = "/tmp/memascend_cuda_XXXXXX";
  EXPECT(mkdtemp(directory) != nullptr);
  const StandIn stand_in = build_stand_in(directory);
  a_missing_library_or_context_is_a_reason_not_an_error(stand_in);
  a_failure_at_the_third_chunk_takes_the_first_two_back(stand_in);
  registrations_end_with_the_last_block_not_with_the_allocator(stand_in);
  no_block_lies_across_two_registrations(stand_in);
  unlink((std::string(directory) + "/fake_cuda.cpp").c_str());
  unlink(stand_in.path.c_str());
  rmdir(directory);
}

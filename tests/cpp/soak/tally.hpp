// What a soak has counted, and how it says what is wrong and how to see it again.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "nvme/engine/memory.hpp"

namespace memascend::soak {

/// Counts of all rounds; any thread.
struct Tally {
  std::atomic<std::uint64_t> rounds = 0;
  std::atomic<std::uint64_t> stores = 0;
  std::atomic<std::uint64_t> operations = 0;
  std::atomic<std::uint64_t> writes = 0;
  std::atomic<std::uint64_t> reads = 0;
  std::atomic<std::uint64_t> lent_blocks = 0;
  std::atomic<std::uint64_t> blocks = 0;
  std::atomic<std::uint64_t> checked_bytes = 0;  // read, and compared with the model
  // What the model expected to go wrong, and did.
  std::atomic<std::uint64_t> failed_transfers = 0;
  std::atomic<std::uint64_t> refused_reads = 0;  // of keys whose write had failed
  std::atomic<std::uint64_t> full_volumes = 0;
  std::atomic<std::uint64_t> memory_limits = 0;
  std::atomic<std::uint64_t> pauses = 0;
  MemoryFaultCounts faults;
};

/// Says from which round on; a crash and a sanitizer's report then name it, too.
void begin_round(std::uint64_t seed, const std::string& engine);
/// Says who acts next on this thread.
void begin_operation(std::size_t worker, std::uint64_t operation, const char* name);

/// Prints what is wrong, where, and the command that repeats the round; ends the program with 1.
[[noreturn]] void fail(const std::string& what);

/// Makes crashes and sanitizers print the round, too.
void install_reports();

}  // namespace memascend::soak

#define SOAK_EXPECT(condition, ...)                                            \
  do {                                                                         \
    if (!(condition)) ::memascend::soak::fail(::memascend::join(__VA_ARGS__)); \
  } while (false)

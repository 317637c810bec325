// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/memory/*.cpp csrc/nvme/**/*.cpp
// sources: tests/cpp/soak/*.cpp
//
// The soak: random operations on stores and allocators by several threads, with seeded
// faults, compared with a model. Some seconds of it are a test; `make soak` runs it for longer.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>

#include "base/check.hpp"
#include "round.hpp"

namespace memascend::soak {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than a loaded disk takes for anything.
constexpr std::chrono::seconds kPatience{240};

struct Arguments {
  double seconds = 4;
  std::uint64_t seed = 1;
  std::uint64_t round_count = UINT64_MAX;
  std::string engine = "all";
  std::string directory = ".";
};

Arguments parse(int count, char** words) {
  Arguments result;
  for (int index = 1; index + 1 < count; index += 2) {
    const std::string name = words[index];
    const char* value = words[index + 1];
    if (name == "--seconds") {
      result.seconds = std::atof(value);
    } else if (name == "--seed") {
      result.seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--rounds") {
      result.round_count = std::strtoull(value, nullptr, 10);
    } else if (name == "--engine") {
      result.engine = value;
    } else if (name == "--directory") {
      result.directory = value;
    } else {
      std::fprintf(stderr, "no option %s\n", name.c_str());
      std::exit(2);
    }
  }
  return result;
}

// Ends the program when no worker has got anywhere for too long.
void watch(const Tally& tally, const std::atomic<bool>& over) {
  std::uint64_t last = 0;
  auto since = Clock::now();
  while (!over) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const std::uint64_t now = tally.operations + tally.rounds;
    if (now != last) since = Clock::now();
    last = now;
    if (Clock::now() - since > kPatience) {
      fail(join("HANG: no operation has ended for ", kPatience.count(), " s"));
    }
  }
}

// Half of the rounds on the engine that can do wrong.
std::string engine_of(std::uint64_t round, const Arguments& arguments) {
  constexpr const char* kEngines[] = {"memory", "uring", "memory", "threads", "memory", "libaio"};
  return arguments.engine == "all" ? kEngines[round % std::size(kEngines)] : arguments.engine;
}

void print(const Tally& tally, double seconds) {
  const auto line = [](const char* name, std::uint64_t value) {
    std::printf("%-18s %llu\n", name, static_cast<unsigned long long>(value));
  };
  std::printf("%-18s %.0f\n", "seconds", seconds);
  line("rounds", tally.rounds);
  line("stores", tally.stores);
  line("operations", tally.operations);
  line("writes", tally.writes);
  line("reads", tally.reads);
  line("lent_blocks", tally.lent_blocks);
  line("blocks", tally.blocks);
  line("checked_bytes", tally.checked_bytes);
  line("short_transfers", tally.faults.short_transfer);
  line("again", tally.faults.again);
  line("eio", tally.faults.eio);
  line("flips", tally.faults.flip);
  line("enospc", tally.faults.enospc);
  line("reordered", tally.faults.reorder);
  line("delayed", tally.faults.delay);
  line("pauses", tally.pauses);
  line("failed_transfers", tally.failed_transfers);
  line("refused_reads", tally.refused_reads);
  line("full_volumes", tally.full_volumes);
  line("memory_limits", tally.memory_limits);
  // Either ends the program where it is found.
  line("losses", 0);
  line("leaked_blocks", 0);
}

}  // namespace
}  // namespace memascend::soak

int main(int argument_count, char** words) {
  using namespace memascend;
  using namespace memascend::soak;
  const Arguments arguments = parse(argument_count, words);
  install_reports();
  Tally tally;
  std::atomic<bool> over = false;
  std::thread watcher([&] { watch(tally, over); });
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::set<std::string> missing;
  for (std::uint64_t round = 0; round < arguments.round_count; ++round) {
    if (round > 0 && elapsed() >= arguments.seconds) break;
    std::string engine = engine_of(round, arguments);
    if (missing.contains(engine)) engine = "threads";
    begin_round(arguments.seed + round, engine);
    try {
      run_round(make_plan(arguments.seed + round, engine, arguments.directory), tally);
    } catch (const EngineUnavailableError& error) {
      std::printf("without %s: %s\n", engine.c_str(), error.what());
      if (arguments.engine != "all") return 77;
      missing.insert(engine);
    }
  }
  over = true;
  watcher.join();
  print(tally, elapsed());
  return 0;
}

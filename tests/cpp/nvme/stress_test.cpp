// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// Short-lived stores and tiny transfers by several threads, on each engine: no call waits for ever,
// and the watchdog has nothing to say. Runs for the seconds given (default 2 per engine).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "nvme/store.hpp"

namespace memascend {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBytes = 64 * 1024;
constexpr std::size_t kBlockBytes = 4096;
constexpr std::size_t kThreadCount = 3;
// A loaded machine's disk may be silent for seconds; a lost wake-up lasts.
constexpr std::chrono::seconds kPatience{120};

struct alignas(kBlockBytes) Block {
  std::byte bytes[kBytes];
};

std::shared_ptr<Store> open_store(const std::string& engine, Block* bounce) {
  StoreOptions options;
  options.volumes = {{"."}};
  options.engine = engine;
  options.engine_options.queue_depth = 8;
  options.grow_bytes = std::uint64_t{1} << 20;
  options.transfer.chunk_bytes = 16 * 1024;
  options.transfer.bounce = bounce->bytes;
  options.transfer.watchdog = kPatience;
  return Store::open(std::move(options));
}

void wait(Store& store, Ticket& ticket) {
  if (store.wait(ticket, kPatience)) return;
  std::printf("%s: a transfer of %llu bytes is not over after %lld s\n",
              store.engine_name().c_str(), static_cast<unsigned long long>(ticket.nbytes()),
              static_cast<long long>(kPatience.count()));
  std::_Exit(1);  // the store's destructor would wait, too
}

// One key per thread and one that all of them read and write, so that transfers follow each other.
void use(Store& store, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto memory = std::make_unique<Block>();
  std::memset(memory->bytes, static_cast<int>(seed % 251), kBytes);
  const std::string own = join("key ", seed);
  for (int turn = 0; turn < 8; ++turn) {
    const std::string& key = random() % 2 == 0 ? own : "shared";
    const std::size_t nbytes = 1 + random() % kBytes;
    try {
      const auto written = store.write(key, nbytes, {memory->bytes, kBytes, nullptr});
      if (random() % 2 == 0) wait(store, *written);
      const auto read = store.read(key, 1, {memory->bytes, 0, nullptr});
      wait(store, *read);
      wait(store, *written);
    } catch (const StoreError& error) {
      MA_INVARIANT(key == "shared" && error.place().code == ENOENT);  // discarded by another
    }
    if (random() % 8 == 0) store.discard(key);
    if (random() % 8 == 0) store.wait_all();
    if (random() % 8 == 0) store.engine_description();
  }
  store.wait_all();
}

void stores_come_and_go(const std::string& engine, Clock::time_point end) {
  const auto bounce = std::make_unique<Block>();
  std::uint64_t count = 0;
  double slowest_s = 0;
  for (; Clock::now() < end; ++count) {
    const auto start = Clock::now();
    const auto store = open_store(engine, bounce.get());
    std::vector<std::thread> threads;
    for (std::uint64_t index = 1; index < kThreadCount; ++index) {
      threads.emplace_back([&, index] { use(*store, count * kThreadCount + index); });
    }
    use(*store, count * kThreadCount);
    for (std::thread& thread : threads) thread.join();
    MA_INVARIANT(store->stats().counts.at("stalls") == 0);
    store->close();
    slowest_s = std::max(slowest_s, std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::printf("%s: %llu stores, the slowest for %.2f s\n", engine.c_str(),
              static_cast<unsigned long long>(count), slowest_s);
}

}  // namespace
}  // namespace memascend

int main(int argument_count, char** arguments) {
  using namespace memascend;
  const auto seconds = std::chrono::seconds(argument_count > 1 ? std::atoi(arguments[1]) : 2);
  for (const char* engine : {"threads", "uring"}) {
    try {
      stores_come_and_go(engine, Clock::now() + seconds);
    } catch (const EngineUnavailableError& error) {
      std::printf("without %s: %s\n", engine, error.what());
    }
  }
  return 0;
}

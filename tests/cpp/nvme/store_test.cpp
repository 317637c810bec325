// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// The store under several threads, on each engine; the memory engine adds faults. For sanitizers.
#include "nvme/store.hpp"

#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::size_t kKeyBytesMax = 200'000;
constexpr std::size_t kMargin = 1024;  // canaries around each target
constexpr std::byte kCanary{0xa5};

alignas(4096) std::byte bounce[256 * 1024];

std::shared_ptr<Store> open_store(const std::string& engine, std::uint64_t seed, double eio,
                                  Verify verify = Verify::kOff) {
  StoreOptions options;
  options.volumes = {{"."}};
  options.engine = engine;
  options.engine_options.queue_depth = 16;
  options.engine_options.faults = std::make_shared<MemoryFaults>();
  MemoryFaults& faults = *options.engine_options.faults;
  faults.seed = seed;
  faults.short_transfer = 0.2;
  faults.again = 0.1;
  faults.reorder = 0.5;
  faults.delay = 0.1;
  faults.eio = eio;
  options.verify = verify;
  options.grow_bytes = std::uint64_t{4} << 20;
  options.transfer.chunk_bytes = 64 * 1024;
  options.transfer.bounce = bounce;
  options.transfer.eio_retries = 1;
  options.transfer.eio_pause = std::chrono::milliseconds(1);
  return Store::open(std::move(options));
}

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t nbytes) {
  std::vector<std::byte> bytes(nbytes);
  const std::uint64_t first = random();
  for (std::size_t at = 0; at < nbytes; ++at) {
    bytes[at] = static_cast<std::byte>((first >> (at % 8 * 8)) + at / 8);
  }
  return bytes;
}

// Writes, rewrites a part, reads all back beside canaries; on keys that no other thread uses.
void work(Store& store, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int turn = 0; turn < 40; ++turn) {
    const std::string key = join("thread ", seed, " key ", random() % 3);
    std::vector<std::byte> content = random_bytes(random, 1 + random() % kKeyBytesMax);
    auto source = std::make_shared<std::vector<std::byte>>(content);
    store.write(key, content.size(), {source->data(), 0, source});
    const std::size_t offset = random() % content.size();
    const std::size_t nbytes = 1 + random() % (content.size() - offset);
    auto part = std::make_shared<std::vector<std::byte>>(random_bytes(random, nbytes));
    std::memcpy(content.data() + offset, part->data(), nbytes);
    store.write(key, nbytes, {part->data(), 0, part}, offset);
    source.reset();
    part.reset();
    std::vector<std::byte> target(content.size() + 2 * kMargin, kCanary);
    const auto ticket = store.read(key, content.size(), {target.data() + kMargin, 0, nullptr});
    store.wait(*ticket);
    MA_INVARIANT(std::memcmp(target.data() + kMargin, content.data(), content.size()) == 0);
    for (std::size_t at = 0; at < kMargin; ++at) {
      MA_INVARIANT(target[at] == kCanary);
      MA_INVARIANT(target[target.size() - 1 - at] == kCanary);
    }
    if (turn % 5 == 0) MA_INVARIANT(store.discard(key));
    if (turn % 8 == 0) store.stats();
  }
}

void threads_share_a_store(const std::string& engine, std::uint64_t seed,
                           Verify verify = Verify::kOff) {
  const auto store = open_store(engine, seed, 0, verify);
  std::vector<std::thread> threads;
  for (std::uint64_t index = 0; index < 4; ++index) {
    threads.emplace_back([&store, index, seed] { work(*store, seed * 100 + index); });
  }
  for (std::thread& thread : threads) thread.join();
  store->wait_all();
  for (const std::string& key : store->keys()) store->discard(key);
  MA_INVARIANT(store->stats().counts.at("used_bytes") == 0);
  store->close();
}

// A failed transfer throws, names its key, and leaves its memory to its owner at once.
void errors_leave_memory_quiet(std::uint64_t seed) {
  const auto store = open_store("memory", seed, 0.2);
  std::size_t error_count = 0;
  for (int turn = 0; turn < 100; ++turn) {
    std::vector<std::byte> content(kKeyBytesMax);
    try {
      store->wait(*store->write("k", content.size(), {content.data(), 0, nullptr}));
      store->wait(*store->read("k", content.size(), {content.data(), 0, nullptr}));
    } catch (const StoreError& error) {
      MA_INVARIANT(error.place().key == "k");
      MA_INVARIANT(error.place().code == EIO);
      ++error_count;
    }
    content.clear();  // ASan sees who writes to it from here on
    content.shrink_to_fit();
  }
  MA_INVARIANT(error_count > 0);
  MA_INVARIANT(store->stats().counts.at("eio_retries") > 0);
}

void a_dropped_store_ends_its_transfers_first() {
  auto content = std::make_shared<std::vector<std::byte>>(kKeyBytesMax);
  const std::weak_ptr<void> alive = content;
  {
    const auto store = open_store("memory", 1, 0);
    store->write("k", content->size(), {content->data(), 0, content});
    content.reset();
  }
  MA_INVARIANT(alive.expired());
}

// Of two calls that wait for a key to be resized, the second finds the size it wants: what the
// first has written meanwhile stays.
void a_reservation_keeps_what_came_before_it() {
  for (std::uint64_t turn = 0; turn < 20; ++turn) {
    StoreOptions options;
    options.volumes = {{"."}};
    options.engine = "memory";
    options.engine_options.faults = std::make_shared<MemoryFaults>();
    MemoryFaults& faults = *options.engine_options.faults;
    options.transfer.bounce = bounce;
    const auto store = Store::open(std::move(options));
    std::vector<std::byte> old(1000);
    std::vector<std::byte> content(2000, std::byte{7});
    faults.paused = true;
    store->write("k", old.size(), {old.data(), 0, nullptr});
    std::thread writer(
        [&] { store->wait(*store->write("k", content.size(), {content.data(), 0, nullptr})); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::thread reserver([&] { store->reserve("k", content.size()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    faults.paused = false;
    writer.join();
    reserver.join();
    std::vector<std::byte> target(content.size());
    store->wait(*store->read("k", target.size(), {target.data(), 0, nullptr}));
    MA_INVARIANT(target == content);
  }
}

// Threads that want one key, and the room for it is there once: each finds it, or finds it full,
// and what is there has its room.
void threads_share_the_last_room() {
  constexpr std::uint64_t kBytes = std::uint64_t{64} << 10;
  StoreOptions options;
  options.volumes = {{"."}};
  options.engine = "memory";
  options.grow_bytes = 4096;
  options.engine_options.faults = std::make_shared<MemoryFaults>();
  options.engine_options.faults->capacity_bytes = kBytes;
  options.transfer.bounce = bounce;
  const auto store = Store::open(std::move(options));
  for (int turn = 0; turn < 300; ++turn) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&] {
        try {
          store->reserve("k", kBytes);
        } catch (const StoreFullError&) {  // another thread has just taken the room
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    MA_INVARIANT(store->stats().counts["used_bytes"] == kBytes);
    MA_INVARIANT(store->discard("k"));
  }
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<std::byte> content(kBytes, static_cast<std::byte>(thread));
      for (int turn = 0; turn < 300; ++turn) {
        try {
          store->wait(*store->write("k", kBytes, {content.data(), 0, nullptr}));
          if (turn % 3 == thread % 3) store->discard("k");
        } catch (const StoreFullError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  store->discard("k");
  MA_INVARIANT(store->stats().counts["used_bytes"] == 0);
}

}  // namespace
}  // namespace memascend

int main() {
  using namespace memascend;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    threads_share_a_store("memory", seed);
    threads_share_a_store("memory", seed, Verify::kFull);
    errors_leave_memory_quiet(seed);
  }
  threads_share_the_last_room();
  threads_share_a_store("threads", 1);
  threads_share_a_store("threads", 1, Verify::kFull);
  try {
    threads_share_a_store("uring", 1);
    threads_share_a_store("uring", 1, Verify::kFull);
  } catch (const EngineUnavailableError& error) {
    std::printf("without uring: %s\n", error.what());
  }
  a_dropped_store_ends_its_transfers_first();
  a_reservation_keeps_what_came_before_it();
  return 0;
}

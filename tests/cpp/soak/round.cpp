#include "round.hpp"

#include <algorithm>
#include <thread>

#include "base/align.hpp"
#include "base/check.hpp"
#include "worker.hpp"

namespace memascend::soak {
namespace {

constexpr std::size_t kKeyCount = 16;

// Volumes that fall silent and speak again.
void pause_now_and_then(MemoryFaults& faults, const std::atomic<bool>& over, const Plan& plan,
                        Tally& tally) {
  Random random(plan.seed);
  while (!over) {
    std::this_thread::sleep_for(std::chrono::milliseconds(below(random, 10)));
    faults.paused_volume = static_cast<int>(below(random, plan.volumes.size()));
    faults.paused = one_in(random, 4);
    ++tally.pauses;
    std::this_thread::sleep_for(std::chrono::milliseconds(below(random, 10)));
    faults.paused = false;
    faults.paused_volume = -1;
  }
}

void let_them_work(Scene& scene, MemoryFaults& faults) {
  std::atomic<bool> over = false;
  std::thread pauser;
  if (scene.plan.pauses) {
    pauser = std::thread([&] { pause_now_and_then(faults, over, scene.plan, scene.tally); });
  }
  std::vector<std::thread> workers;
  for (std::size_t index = 0; index < scene.plan.worker_count; ++index) {
    workers.emplace_back([&scene, index] { Worker(scene, index).run(); });
  }
  if (scene.plan.closes_early) {
    std::this_thread::sleep_for(std::chrono::milliseconds(scene.plan.seed % 50));
    scene.closing = true;
    scene.store->close();
  }
  for (std::thread& worker : workers) worker.join();
  over = true;
  if (pauser.joinable()) pauser.join();
}

// Reads everything once more.
void check_contents(Scene& scene) {
  for (KeyModel& key : scene.keys) {
    SOAK_EXPECT(scene.store->contains(key.name) == key.present, "contains(", key.name, ")");
    if (!key.present) continue;
    const Verdict verdict = key.verdict(*scene.store, scene.plan, scene.tally);
    SOAK_EXPECT(verdict != Verdict::kOpen, "writes of \"", key.name, "\" are not over");
    std::vector<std::byte> bytes(key.content.size());
    try {
      const auto ticket = scene.store->read(key.name, bytes.size(), {bytes.data(), 0, nullptr});
      SOAK_EXPECT(verdict == Verdict::kGood, "\"", key.name, "\" was read though a write failed");
      scene.store->wait(*ticket);
    } catch (const StoreError& error) {
      SOAK_EXPECT(scene.plan.fails(), "the last read of \"", key.name, "\": ", error.what());
      continue;
    }
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      SOAK_EXPECT(bytes[at] == key.content[at] || !key.known[at], "LOSS: byte ", at, " of \"",
                  key.name, "\" at the end");
    }
    scene.tally.checked_bytes += bytes.size();
  }
}

// Used bytes are those of the keys, and all that is said to be available can be had.
void check_space(Scene& scene) {
  Store& store = *scene.store;
  const std::uint64_t block_bytes = std::max(kPageBytes, store.alignment().offset_bytes);
  std::uint64_t used_bytes = 0;
  for (const std::string& key : store.keys()) {
    used_bytes += align_up(store.nbytes(key), block_bytes);
  }
  const auto counts = store.stats().counts;
  const std::uint64_t left = counts.at("in_flight_count"), used = counts.at("used_bytes");
  SOAK_EXPECT(left == 0, left, " transfers are left");
  SOAK_EXPECT(used == used_bytes, used, " bytes are used, keys have ", used_bytes);
  const std::uint64_t available_bytes = store.available_bytes();
  try {
    store.reserve("all the rest", available_bytes);
  } catch (const StoreFullError& error) {
    fail(join("there were ", available_bytes, " bytes: ", error.what()));
  }
  try {
    store.reserve("one more", 1);
    fail("there is room beyond what was available");
  } catch (const StoreFullError&) {
  }
  for (const std::string& key : store.keys()) store.discard(key);
  SOAK_EXPECT(store.stats().counts.at("used_bytes") == 0, "space is lost");
}

// The blocks, after every transfer and every worker.
void check_memory(Scene& scene, const std::string& when) {
  SOAK_EXPECT(scene.lent.count() == 0, "LEAK: ", scene.lent.count(), " blocks are held ", when);
  SOAK_EXPECT(scene.allocator->is_valid(), "the allocator is not valid ", when);
  for (const auto& [name, component] : scene.allocator->components()) {
    SOAK_EXPECT(component.live_bytes == 0, "LEAK: ", component.live_bytes, " bytes of ", name);
  }
}

void add_faults(const MemoryFaultCounts& counts, Tally& tally) {
  tally.faults.short_transfer += counts.short_transfer;
  tally.faults.eio += counts.eio;
  tally.faults.flip += counts.flip;
  tally.faults.enospc += counts.enospc;
  tally.faults.again += counts.again;
  tally.faults.reorder += counts.reorder;
  tally.faults.delay += counts.delay;
}

void use_a_store(const Plan& plan, Tally& tally, const std::shared_ptr<Allocator>& allocator,
                 std::uint64_t serial) {
  LentBlocks lent;
  const auto faults = make_faults(plan, serial);
  Scene scene{plan, tally, allocator, lent, nullptr, {}, false};
  scene.store = open_store(plan, allocator->allocate(plan.bounce_bytes, "bounce", false), faults);
  for (std::size_t key = 0; key < kKeyCount; ++key) scene.keys.emplace_back(join("key ", key));
  let_them_work(scene, *faults);
  begin_operation(plan.worker_count, 0, "final checks");
  if (!plan.closes_early) {
    scene.store->wait_all();
    check_contents(scene);
    check_space(scene);
    if (plan.seed % 2 == 0) scene.store->close();
  }
  scene.keys.clear();
  scene.store.reset();
  check_memory(scene, "after the store");
  add_faults(faults->counts, tally);
  ++tally.stores;
}

}  // namespace

void run_round(const Plan& plan, Tally& tally) {
  const auto allocator = Allocator::create(plan.allocator);
  for (std::size_t serial = 0; serial < plan.store_count; ++serial) {
    use_a_store(plan, tally, allocator, serial);
  }
  const AllocatorStats stats = allocator->stats();
  SOAK_EXPECT(stats.block_count == 0, "LEAK: ", stats.block_count, " blocks");
  SOAK_EXPECT(stats.requested_bytes == 0, "LEAK: ", stats.requested_bytes, " bytes");
  allocator->trim();
  SOAK_EXPECT(allocator->stats().reserved_bytes == 0, "trim() has left memory");
  ++tally.rounds;
}

}  // namespace memascend::soak

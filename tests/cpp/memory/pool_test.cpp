// sources: csrc/memory/*.cpp csrc/system/pages.cpp csrc/system/cuda_driver.cpp
// Pool: a slot is leased to one at a time, also while another thread still holds it for I/O.
#include "memory/pool.hpp"

#include <atomic>
#include <random>
#include <thread>

#include "support/expect.hpp"

using namespace memascend;

namespace {

std::shared_ptr<Pool> small_pool(std::uint64_t slot_count) {
  AllocatorOptions options;
  options.arena.range_bytes = std::uint64_t{256} << 20;
  options.arena.pages.prefault_threads = 1;
  auto pool = Pool::create(Allocator::create(options), "pool");
  pool->add_class("small", 5000, slot_count);
  pool->add_class("large", 20000, slot_count);
  return pool;
}

void a_slot_held_by_io_is_not_leased_again() {
  const auto pool = small_pool(1);
  auto lease = pool->acquire(5000, false);
  const std::byte* address = lease->address();
  std::shared_ptr<void> in_flight = lease->hold();
  lease->release();
  lease->release();
  EXPECT(lease->released());
  EXPECT(pool->acquire(5000, false) == nullptr);
  in_flight.reset();
  EXPECT(pool->acquire(5000, false)->address() == address);
}

void a_lease_outlives_its_pool() {
  auto pool = small_pool(1);
  const auto lease = pool->acquire(100, false);
  pool.reset();
  lease->address()[0] = std::byte{1};
}

void a_larger_class_serves_only_when_asked() {
  const auto pool = small_pool(1);
  const auto taken = pool->acquire(1, false);
  EXPECT(pool->acquire(1, false) == nullptr);
  const Exhaustion exhaustion = pool->exhaustion(1);
  EXPECT(exhaustion.class_name == "small");
  EXPECT(exhaustion.slot_bytes == 8192);
  EXPECT(exhaustion.slot_count == 1);
  EXPECT(exhaustion.leased_count == 1);
  EXPECT(pool->acquire(1, true)->class_name() == "large");
  EXPECT(pool->exhaustion(1 << 20).class_name.empty());
}

/// Each thread writes its own mark into a slot, hands a hold to a "device" that checks the mark
/// after the lease was released, and only then lets go.
void threads_never_share_a_slot() {
  constexpr int kThreadCount = 4;
  constexpr int kStepCount = 2000;
  const auto pool = small_pool(3);
  std::atomic<int> clash_count{0};
  auto work = [&](int thread_index) {
    std::mt19937 random(static_cast<unsigned>(thread_index));
    const auto mark = static_cast<std::byte>(thread_index + 1);
    for (int step = 0; step < kStepCount; ++step) {
      auto lease = pool->acquire(random() % 2 == 0 ? 5000 : 20000, random() % 2 == 0);
      if (lease == nullptr) {
        std::this_thread::yield();
        continue;
      }
      std::byte* slot = lease->address();
      *slot = mark;
      const std::shared_ptr<void> in_flight = lease->hold();
      lease.reset();
      if (*slot != mark) ++clash_count;
      if (step == kStepCount / 2) pool->add_slots("small", 1);
    }
  };
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreadCount; ++index) threads.emplace_back(work, index);
  for (std::thread& thread : threads) thread.join();
  EXPECT(clash_count == 0);
  EXPECT(pool->is_valid());
  for (const ClassStats& stats : pool->classes()) EXPECT(stats.leased_count == 0);
}

}  // namespace

int main() {
  a_slot_held_by_io_is_not_leased_again();
  a_lease_outlives_its_pool();
  a_larger_class_serves_only_when_asked();
  threads_never_share_a_slot();
}

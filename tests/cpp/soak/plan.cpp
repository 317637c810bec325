#include "plan.hpp"

#include <chrono>

#include "base/align.hpp"
#include "base/check.hpp"
#include "buffer.hpp"

namespace memascend::soak {
namespace {

constexpr std::uint64_t kKib = 1024;
constexpr std::uint64_t kMib = 1024 * kKib;
// A loaded machine's disk may be silent for seconds; the soak has a watchdog of its own.
constexpr std::chrono::seconds kDevicePatience{600};

void choose_faults(Plan* plan, Random& random) {
  if (plan->engine != "memory" || one_in(random, 5)) return;
  plan->short_transfer = one_in(random, 3) ? 0 : 0.2;
  plan->again = one_in(random, 3) ? 0 : 0.1;
  plan->reorder = one_in(random, 3) ? 0 : 0.5;
  plan->delay = one_in(random, 3) ? 0 : 0.02;
  plan->pauses = one_in(random, 3);
  plan->eio_retries = static_cast<unsigned>(below(random, 3));
  if (plan->verify != Verify::kOff && one_in(random, 2)) plan->flip = 0.05;
  if (one_in(random, 2)) return;
  plan->eio = one_in(random, 3) ? 0.05 : 0.005;
  plan->enospc = one_in(random, 2) ? 0 : 0.01;
}

// With checksums everything moves in whole grains.
void choose_verify(Plan* plan, Random& random) {
  if (one_in(random, 2)) return;
  plan->verify = one_in(random, 2) ? Verify::kReads : Verify::kFull;
  const std::uint64_t grain = Checksums::kGrainBytes;
  plan->chunk_bytes = align_up(plan->chunk_bytes, grain);
  plan->stripe_bytes = align_up(plan->stripe_bytes, grain);
  plan->bounce_bytes = grain * plan->volumes.size() * (1 + below(random, 4));
}

}  // namespace

Plan make_plan(std::uint64_t seed, const std::string& engine, const std::string& directory) {
  Random random(seed);
  Plan plan;
  plan.seed = seed;
  plan.engine = engine;
  const std::size_t volume_count = 1 + below(random, 3);
  for (std::size_t index = 0; index < volume_count; ++index) {
    VolumeOptions volume;
    volume.path = directory;
    volume.weight = static_cast<double>(1 + below(random, 8)) / 2;
    // Often too small for all keys together, and not always a whole number of blocks.
    volume.capacity_bytes = (1 + below(random, 4)) * kMib + (one_in(random, 3) ? 1000 : 0);
    plan.volumes.push_back(volume);
  }
  plan.worker_count = 2 + below(random, 3);
  plan.operation_count = 100 + below(random, 300);
  plan.store_count = 1 + below(random, 2);
  plan.closes_early = one_in(random, 4);
  plan.queue_depth = one_in(random, 4) ? 1 : 1 + below(random, 32);
  plan.chunk_bytes = 4 * kKib << below(random, 7);
  plan.stripe_bytes = one_in(random, 3) ? 0 : 4 * kKib << below(random, 6);
  plan.bounce_bytes = 4 * kKib * volume_count << below(random, 5);
  plan.allocator.arena.range_bytes = 256 * kMib;
  plan.allocator.arena.pages.prefault_threads = 1;
  plan.allocator.arena.pages.lock = one_in(random, 2);
  plan.allocator.arena.pages.huge_pages =
      one_in(random, 2) ? HugePages::kTransparent : HugePages::kOff;
  plan.allocator.limit_bytes = (5 + below(random, 8)) * kMib;
  choose_verify(&plan, random);
  choose_faults(&plan, random);
  return plan;
}

std::shared_ptr<MemoryFaults> make_faults(const Plan& plan, std::uint64_t serial) {
  auto faults = std::make_shared<MemoryFaults>();
  faults->seed = plan.seed * 16 + serial;
  faults->short_transfer = plan.short_transfer;
  faults->eio = plan.eio;
  faults->enospc = plan.enospc;
  faults->again = plan.again;
  faults->reorder = plan.reorder;
  faults->delay = plan.delay;
  faults->flip = plan.flip;
  return faults;
}

std::shared_ptr<Store> open_store(const Plan& plan, std::shared_ptr<Block> bounce,
                                  std::shared_ptr<MemoryFaults> faults) {
  StoreOptions options;
  options.volumes = plan.volumes;
  options.engine = plan.engine;
  options.engine_options.queue_depth = plan.queue_depth;
  options.engine_options.thread_count = 2;
  options.engine_options.faults = std::move(faults);
  options.grow_bytes = kMib / 4;
  options.stripe_bytes = plan.stripe_bytes;
  options.transfer.chunk_bytes = plan.chunk_bytes;
  options.transfer.bounce = {bounce->address(), plan.bounce_bytes};
  options.transfer.watchdog = kDevicePatience;
  options.transfer.eio_retries = plan.eio_retries;
  options.transfer.eio_pause = std::chrono::milliseconds(1);
  options.verify = plan.verify;
  options.bounce_hold = std::move(bounce);
  return Store::open(std::move(options));
}

}  // namespace memascend::soak

// Plans: what one round runs on, all of it chosen by its seed.
#pragma once

#include <string>

#include "memory/allocator.hpp"
#include "nvme/store.hpp"

namespace memascend::soak {

struct Plan {
  std::uint64_t seed = 0;
  std::string engine;
  std::vector<VolumeOptions> volumes;
  std::size_t worker_count = 0;
  std::size_t operation_count = 0;  // of each worker on each store
  std::size_t store_count = 0;      // opened one after another
  bool closes_early = false;        // the store, while others use it
  bool pauses = false;              // volumes fall silent for a while
  std::size_t queue_depth = 0;
  std::uint64_t chunk_bytes = 0;
  std::uint64_t stripe_bytes = 0;
  std::uint64_t bounce_bytes = 0;
  Verify verify = Verify::kOff;
  unsigned eio_retries = 0;
  AllocatorOptions allocator;

  double short_transfer = 0;
  double eio = 0;
  double enospc = 0;
  double again = 0;
  double reorder = 0;
  double delay = 0;
  double flip = 0;  // a bit turns on its way, which verification finds

  /// Whether transfers may fail. A bit that turns again when its request is repeated is an error.
  bool fails() const { return eio > 0 || enospc > 0 || flip > 0; }
};

Plan make_plan(std::uint64_t seed, const std::string& engine, const std::string& directory);

/// Opens a store as planned. `bounce` is its own; `faults` are the memory engine's.
std::shared_ptr<Store> open_store(const Plan& plan, std::shared_ptr<Block> bounce,
                                  std::shared_ptr<MemoryFaults> faults);
std::shared_ptr<MemoryFaults> make_faults(const Plan& plan, std::uint64_t serial);

}  // namespace memascend::soak

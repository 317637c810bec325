// Memory engines for the volumes of a test's transfer queue.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "nvme/engine/memory.hpp"

namespace memascend {

inline EngineOptions memory_options(std::shared_ptr<MemoryFaults> faults, std::size_t queue_depth,
                                    int volume_index = 0) {
  EngineOptions options;
  options.queue_depth = queue_depth;
  options.faults = std::move(faults);
  options.volume_index = volume_index;
  return options;
}

inline std::vector<std::unique_ptr<Engine>> memory_engines(
    const std::shared_ptr<MemoryFaults>& faults, std::size_t queue_depth,
    std::span<const Volume> volumes) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (const Volume& volume : volumes) {
    const auto index = static_cast<int>(engines.size());
    engines.push_back(
        std::make_unique<MemoryEngine>(memory_options(faults, queue_depth, index), volume));
  }
  return engines;
}

}  // namespace memascend

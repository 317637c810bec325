// Chooses an engine by really doing I/O with it.
#pragma once

#include <memory>
#include <string>

#include "nvme/engine/engine.hpp"
#include "nvme/engine/volumes.hpp"

namespace memascend {

inline constexpr std::size_t kQueueDepthMax = 4096;

struct EngineChoice {
  std::unique_ptr<Engine> engine;
  std::string reason;  // why this engine, one phrase
};

/// Makes the engine of a volume called `name`: "uring", "libaio", "threads", "memory", or "auto"
/// for the first of uring, libaio (with direct I/O) and threads that can write a few blocks to
/// another volume at `place`, on which nothing is yet, and read them back. Throws
/// EngineUnavailableError when an engine asked for by name, or every engine, fails that probe;
/// std::invalid_argument for an unknown name.
EngineChoice make_engine(const std::string& name, const EngineOptions& options,
                         const VolumeOptions& place, const Volume& volume);

}  // namespace memascend

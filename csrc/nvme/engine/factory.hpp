// Chooses an engine by a probe with real I/O.
#pragma once

#include <memory>
#include <string>

#include "nvme/engine/engine.hpp"
#include "nvme/engine/volumes.hpp"

namespace memascend {

inline constexpr std::size_t kQueueDepthMax = 4096;

struct EngineChoice {
  std::unique_ptr<Engine> engine;
  std::string reason;  // reason for this engine, one phrase
};

/// Makes the engine of a volume: "uring", "libaio", "threads", "memory", or "auto" for the first of
/// uring, libaio (with direct I/O) and threads that passes a probe: it writes a few blocks to
/// another volume at `place`, which is still empty, and reads them back. Throws
/// EngineUnavailableError if the named engine, or every engine, fails the probe;
/// std::invalid_argument for an unknown name.
EngineChoice make_engine(const std::string& name, const EngineOptions& options,
                         const VolumeOptions& place, const Volume& volume);

}  // namespace memascend

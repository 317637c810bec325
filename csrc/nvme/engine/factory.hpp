// Chooses an engine by really doing I/O with it.
#pragma once

#include <memory>
#include <string>

#include "nvme/engine/engine.hpp"
#include "nvme/engine/memory.hpp"
#include "nvme/engine/volumes.hpp"

namespace memascend {

inline constexpr std::size_t kQueueDepthMax = 4096;

struct EngineOptions {
  std::size_t queue_depth = 64;
  std::size_t thread_count = 8;          // threads engine, for each volume
  bool sqpoll = false;                   // uring engine: a kernel thread takes submissions
  bool iopoll = false;                   // uring engine: the device is polled
  std::shared_ptr<MemoryFaults> faults;  // memory engine
};

struct EngineChoice {
  std::unique_ptr<Engine> engine;
  std::string reason;  // why this engine, one phrase
};

/// Makes the engine called `name`: "uring", "threads", "memory", or "auto" for the first of uring
/// and threads that can write a few KiB to `volume`, on which nothing is yet, and read them back.
/// Throws EngineUnavailableError when an engine asked for by name, or every engine, fails that
/// probe; std::invalid_argument for an unknown name.
EngineChoice make_engine(const std::string& name, const EngineOptions& options,
                         const VolumeOptions& volume);

}  // namespace memascend

// Engine: a way to run requests on one volume. Four implementations: uring, libaio, threads,
// memory (tests only).
//
// An engine moves bytes and reports completions. Comparing a completion with its request,
// resubmitting short transfers, splitting and retrying belong to the lane above it
// (transfer/lane.hpp), once for all engines.
//
// Threads: one thread issues. It calls start(), and from then on it alone calls every other method
// but wake(), which any thread may call, and destroys the engine. Construction may happen on
// another thread. (One issuer lets io_uring skip its locks and interrupts, and keeps completion
// work off the threads that compute.) Engines may use threads inside.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "nvme/engine/request.hpp"
#include "system/volume.hpp"

namespace memascend {

struct MemoryFaults;

/// A reap() whose system call failed at once waits this long instead: it neither spins nor sleeps
/// through a wake() for long.
inline constexpr std::chrono::milliseconds kRefusalPause{10};

struct EngineOptions {
  std::size_t queue_depth = 64;
  std::size_t thread_count = 8;          // threads engine
  std::shared_ptr<MemoryFaults> faults;  // memory engine
  int volume_index = 0;                  // memory engine: which volume of its faults this is
};

class Engine {
 public:
  virtual ~Engine() = default;
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// "uring", "libaio", "threads" or "memory".
  virtual std::string name() const = 0;
  /// One phrase on what was really obtained, e.g. "io_uring, deferred completions, depth 64"; the
  /// same from start() on.
  virtual std::string description() const = 0;
  /// Requests that may be in flight at once.
  virtual std::size_t queue_depth() const = 0;

  /// Makes the calling thread the issuer. Throws SystemCallError when the kernel refuses.
  virtual void start() = 0;

  /// Starts requests. Pre: in-flight + requests.size() <= queue_depth(). One system call per batch
  /// where the engine has system calls. What the kernel does not take is finished with its -errno.
  virtual void submit(std::span<const Request> requests) = 0;
  /// Collects finished requests into `completions` and returns how many. Blocks until one is there,
  /// wake() was called, or `timeout` has passed (0: does not block); then returns all that are
  /// there, possibly none. It never waits for several: io_uring counts a wake() as one completion,
  /// so a wait for two would sleep through it. Does not throw when a system call fails.
  virtual std::size_t reap(std::span<Completion> completions,
                           std::chrono::milliseconds timeout) = 0;
  /// Makes a blocked reap(), or else the next one, return soon. Any thread; never blocks.
  virtual void wake() noexcept = 0;
};

}  // namespace memascend

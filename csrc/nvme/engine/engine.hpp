// Engine: a way to run requests on one volume. Four implementations: uring, libaio, threads,
// memory (tests only).
//
// An engine moves bytes and reports completions. Comparing a completion with its request,
// resubmitting short transfers, splitting and retrying belong to the lane above it
// (transfer/lane.hpp), once for all engines.
//
// Threads: the issuer is the thread that calls start(). From then on it alone may call the other
// methods, except wake(), which any thread may call, and it destroys the engine. Another thread may
// construct it. (A single issuer lets io_uring skip its locks and interrupts, and keeps completion
// work off the compute threads.) Engines may use threads inside.
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

/// Wait of a reap() whose system call failed at once: it neither spins nor delays a wake() for
/// long.
inline constexpr std::chrono::milliseconds kRefusalPause{10};

struct EngineOptions {
  std::size_t queue_depth = 64;
  std::size_t thread_count = 8;          // threads engine
  std::shared_ptr<MemoryFaults> faults;  // memory engine
  int volume_index = 0;                  // memory engine: index of the volume in its faults
};

class Engine {
 public:
  virtual ~Engine() = default;
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// "uring", "libaio", "threads" or "memory".
  virtual std::string name() const = 0;
  /// One phrase on the engine and the features it obtained, e.g. "io_uring, deferred completions,
  /// depth 64"; constant from start() on.
  virtual std::string description() const = 0;
  /// Requests that may be in flight at once.
  virtual std::size_t queue_depth() const = 0;

  /// Makes the calling thread the issuer. Throws SystemCallError if the kernel refuses.
  virtual void start() = 0;

  /// Starts requests. Pre: in-flight + requests.size() <= queue_depth(). As a rule one system call
  /// per batch. A request that the kernel refuses completes with its -errno.
  virtual void submit(std::span<const Request> requests) = 0;
  /// Collects finished requests into `completions` and returns their number. Blocks until there is
  /// one, wake() was called, or `timeout` has passed (0: does not block); then returns all finished
  /// ones, possibly none. It never waits for several: io_uring counts a wake() as one completion,
  /// so a wait for two would sleep through it. Does not throw if a system call fails.
  virtual std::size_t reap(std::span<Completion> completions,
                           std::chrono::milliseconds timeout) = 0;
  /// Makes a blocked reap(), or else the next one, return soon. Any thread; never blocks.
  virtual void wake() noexcept = 0;
};

}  // namespace memascend

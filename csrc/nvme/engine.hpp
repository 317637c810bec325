// Engine: a way to run requests. Three implementations: uring, threads, memory (tests only).
//
// An engine moves bytes and reports completions. Comparing a completion with its request, resubmitting
// short transfers, splitting and retrying belong to transfer.hpp above it, once for all engines.
// One thread at a time may call any method (the store holds a lock); engines may use threads inside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "nvme/request.hpp"
#include "os/volume.hpp"

namespace memascend {

class Engine {
 public:
  virtual ~Engine() = default;
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// "uring", "threads" or "memory".
  virtual std::string name() const = 0;
  /// One phrase on what was really obtained, e.g. "registered files and buffers, depth 64".
  virtual std::string description() const = 0;
  /// Requests that may be in flight at once.
  virtual std::size_t queue_depth() const = 0;

  /// Makes a volume known. The volume must outlive the engine. Returns its index for requests.
  virtual int attach(const Volume& volume) = 0;
  /// Offers memory for registration (fixed buffers). Best effort: failure is recorded in
  /// description(), never thrown. Requests outside registered memory always work.
  virtual void register_buffer(std::span<std::byte> memory) = 0;
  /// Forgets a span given to register_buffer; required before the memory is unmapped.
  virtual void unregister_buffer(std::span<std::byte> memory) = 0;

  /// Starts requests. Pre: in-flight + requests.size() <= queue_depth(). One system call per batch
  /// where the engine has system calls. Throws only when the engine itself is broken.
  virtual void submit(std::span<const Request> requests) = 0;
  /// Collects finished requests into `completions` and returns how many. With `wait`, blocks until
  /// at least one is there, provided any is in flight; returns 0 when none is.
  virtual std::size_t reap(std::span<Completion> completions, bool wait) = 0;
};

}  // namespace memascend

// Ring: one io_uring, with its two queues mapped into this process.
//
// Knows the kernel's interface (system/uring_abi.hpp); never knows volumes, requests or retries.
// One thread issues: the one that calls start(). Another thread may construct the ring and register
// resources before.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "system/private_descriptor.hpp"
#include "system/uring_abi.hpp"

namespace memascend {

class Ring {
 public:
  /// Sets up a disabled ring with the best mode of the kernel. It holds `entry_count` submissions;
  /// the kernel rounds that up to a power of two. Throws SystemCallError.
  explicit Ring(unsigned entry_count);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  /// Enables the ring; the calling thread becomes its issuer. Throws SystemCallError.
  void start();

  /// The next free submission entry, cleared. Pre: fewer requests than entries are in flight.
  io_uring_sqe* next_submission() noexcept;
  /// Submits all prepared entries and waits until there are `complete_min` completions, `timeout`
  /// has passed or a signal came; one system call unless the kernel takes only a part. Returns 0,
  /// or the errno of a refusal: the entries that were not taken then stay prepared.
  [[nodiscard]] int enter(unsigned complete_min, std::chrono::milliseconds timeout);
  /// Takes back the newest prepared entry that the kernel has not taken, and returns its user_data;
  /// nothing if there is none.
  std::optional<std::uint64_t> withdraw() noexcept;
  /// Copies the oldest completion and frees its place for the kernel; false if there is none.
  bool next_completion(io_uring_cqe* completion) noexcept;
  /// Completions dropped by a kernel short of memory, since the ring's setup.
  unsigned dropped_count() const noexcept;

  /// io_uring_register; 0 or -errno.
  int register_resource(unsigned opcode, const void* argument, unsigned count) const noexcept;
  /// "deferred completions", "cooperative completions" or "plain completions".
  const std::string& mode() const noexcept { return mode_; }

 private:
  void map(const io_uring_params& parameters);
  int enter_once(unsigned submit_count, unsigned complete_min, std::chrono::milliseconds timeout);

  PrivateDescriptor descriptor_;
  std::string mode_;
  std::byte* queues_ = nullptr;  // submission and completion queue share one mapping
  std::size_t queues_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  std::size_t entries_bytes_ = 0;

  unsigned* submission_head_ = nullptr;  // advanced by the kernel
  unsigned* submission_tail_ = nullptr;
  unsigned submission_mask_ = 0;
  unsigned submission_count_ = 0;
  unsigned prepared_tail_ = 0;  // our tail: entries before it are filled, maybe not yet published

  unsigned* completion_head_ = nullptr;
  unsigned* completion_tail_ = nullptr;      // advanced by the kernel
  unsigned* completion_overflow_ = nullptr;  // advanced by the kernel
  unsigned completion_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

}  // namespace memascend

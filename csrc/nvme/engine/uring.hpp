// The uring engine: requests on one io_uring, with a registered file if allowed.
#pragma once

#include <vector>

#include "nvme/engine/engine.hpp"
#include "nvme/engine/ring.hpp"

namespace memascend {

class UringEngine final : public Engine {
 public:
  /// The volume's descriptor must outlive the engine. Throws SystemCallError if the kernel refuses
  /// to set up a ring.
  UringEngine(const EngineOptions& options, const Volume& volume);
  ~UringEngine() override;  // waits for requests in flight

  std::string name() const override { return "uring"; }
  std::string description() const override;
  std::size_t queue_depth() const override { return options_.queue_depth; }
  void start() override;
  void submit(std::span<const Request> requests) override;
  std::size_t reap(std::span<Completion> completions, std::chrono::milliseconds timeout) override;
  void wake() noexcept override;

 private:
  void prepare(const Request& request);
  bool enter(unsigned complete_min, std::chrono::milliseconds timeout);
  std::size_t lost_count() const noexcept;
  void find_lost();
  std::size_t take_completions(std::span<Completion> completions);
  void arm_wake();

  EngineOptions options_;
  Ring ring_;
  PrivateDescriptor wake_descriptor_;
  std::uint64_t wake_value_ = 0;  // the kernel reads the event counter into it
  bool wake_armed_ = false;
  std::vector<std::uint64_t> in_flight_;  // tags
  std::vector<Completion> refused_;       // results of refused or lost requests
  unsigned refusal_count_ = 0;            // consecutive failed system calls
  unsigned lost_found_count_ = 0;
  const int file_;
  bool file_registered_ = false;
};

}  // namespace memascend

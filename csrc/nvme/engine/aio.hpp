// The libaio engine: the kernel's older asynchronous I/O, through its system calls; libaio itself
// is not needed. For containers, whose usual seccomp profiles allow it and refuse io_uring. For
// direct I/O only: without it the kernel does the I/O inside submit().
#pragma once

#include <linux/aio_abi.h>

#include <vector>

#include "nvme/engine/engine.hpp"
#include "system/private_descriptor.hpp"

namespace memascend {

class AioEngine final : public Engine {
 public:
  /// The volume's descriptor must outlive the engine. Throws SystemCallError.
  AioEngine(const EngineOptions& options, const Volume& volume);
  ~AioEngine() override;  // waits for the requests in flight

  std::string name() const override { return "libaio"; }
  std::string description() const override;
  std::size_t queue_depth() const override { return options_.queue_depth; }
  void start() override;
  void submit(std::span<const Request> requests) override;
  std::size_t reap(std::span<Completion> completions, std::chrono::milliseconds timeout) override;
  void wake() noexcept override;

 private:
  bool arm_wake();
  void wait_for_wake(std::chrono::milliseconds timeout);
  void give_up(int code);

  EngineOptions options_;
  const int file_;
  aio_context_t context_ = 0;
  PrivateDescriptor wake_descriptor_;
  bool wake_armed_ = false;
  std::vector<iocb> blocks_;  // of one batch; the kernel copies them
  std::vector<iocb*> block_pointers_;
  std::vector<io_event> events_;
  std::vector<std::uint64_t> in_flight_;  // tags
  std::vector<Completion> refused_;       // results of refused or given-up requests
  int broken_code_ = 0;                   // errno; set once the context is gone
};

}  // namespace memascend

// The model: what each key must contain, whatever was written, failed or was never written.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nvme/store.hpp"
#include "plan.hpp"
#include "tally.hpp"

namespace memascend::soak {

/// What the store must say to a read that begins now.
enum class Verdict {
  kGood,    // no write has failed since the last whole one
  kBroken,  // one has: the read is refused
  kOpen,    // writes are on their way: either
};

enum class Outcome { kPending, kDone, kFailed };

/// What became of a ticket by now. Checks that an error is one that the plan's faults can cause.
Outcome outcome_of(Store& store, Ticket& ticket, const std::string& key, const Plan& plan);

/// One key. `mutex` is held while a transfer is begun, so that the store sees the model's order;
/// not while it runs.
struct KeyModel {
  explicit KeyModel(std::string its_name) : name(std::move(its_name)) {}

  /// The key has new room of `nbytes`, with unknown contents.
  void replace(std::uint64_t nbytes);
  void forget();
  void write(std::uint64_t offset, std::span<const std::byte> bytes,
             std::shared_ptr<Ticket> ticket);
  Verdict verdict(Store& store, const Plan& plan, Tally& tally);

  const std::string name;
  std::mutex mutex;
  bool present = false;
  std::vector<std::byte> content;
  std::vector<bool> known;  // false: never written, so anything

 private:
  struct Write {
    std::shared_ptr<Ticket> ticket;
    bool whole;
  };
  std::deque<Write> writes_;  // whose outcome is not known, oldest first
  bool broken_ = false;       // before those
};

}  // namespace memascend::soak

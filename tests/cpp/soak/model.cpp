#include "model.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.hpp"

namespace memascend::soak {

Outcome outcome_of(Store& store, Ticket& ticket, const std::string& key, const Plan& plan) {
  try {
    const bool over = store.wait(ticket, std::chrono::milliseconds(0));
    return over ? Outcome::kDone : Outcome::kPending;
  } catch (const StoreError& error) {
    const ErrorPlace& place = error.place();
    SOAK_EXPECT(plan.fails(), "a transfer failed without a fault: ", error.what());
    const bool injected = (plan.eio > 0 && place.code == EIO) ||
                          (plan.enospc > 0 && place.code == ENOSPC) ||
                          (plan.flip > 0 && place.code == EBADMSG);
    SOAK_EXPECT(injected, "no such fault: ", error.what());
    SOAK_EXPECT(place.key == key, "the error of \"", key, "\" names another: ", error.what());
    SOAK_EXPECT(!place.volume.empty() && place.nbytes > 0, "no place in ", error.what());
    SOAK_EXPECT(ticket.done(), "a transfer failed and is not over");
    return Outcome::kFailed;
  }
}

void KeyModel::replace(std::uint64_t nbytes) {
  forget();
  present = true;
  content.assign(nbytes, std::byte{0});
  known.assign(nbytes, false);
}

void KeyModel::forget() {
  present = false;
  broken_ = false;
  content.clear();
  known.clear();
  writes_.clear();
}

void KeyModel::write(std::uint64_t offset, std::span<const std::byte> bytes,
                     std::shared_ptr<Ticket> ticket) {
  if (bytes.empty()) return;
  std::memcpy(content.data() + offset, bytes.data(), bytes.size());
  const auto begin = known.begin() + static_cast<std::ptrdiff_t>(offset);
  std::fill_n(begin, bytes.size(), true);
  writes_.push_back({std::move(ticket), bytes.size() == content.size()});
}

Verdict KeyModel::verdict(Store& store, const Plan& plan, Tally& tally) {
  // A whole write follows everything before it and is followed by everything after it, so that the
  // order of beginning decides.
  while (!writes_.empty()) {
    const Write& write = writes_.front();
    const Outcome outcome = outcome_of(store, *write.ticket, name, plan);
    if (outcome == Outcome::kPending) return Verdict::kOpen;
    if (outcome == Outcome::kFailed) {
      broken_ = true;
      ++tally.failed_transfers;
    } else if (write.whole) {
      broken_ = false;
    }
    writes_.pop_front();
  }
  return broken_ ? Verdict::kBroken : Verdict::kGood;
}

}  // namespace memascend::soak

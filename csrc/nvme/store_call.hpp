// How every call enters and leaves a store. Only the store's own files include this.
#pragma once

#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "base/check.hpp"
#include "nvme/store.hpp"

namespace memascend {

/// Holds the mutex. On leaving, drops the holds of finished transfers after unlocking: what they
/// own may take other locks (Python's) in its destructor.
class Store::LockedCall {
 public:
  explicit LockedCall(Store& store) : store_(store) {
    MA_EXPECT(::getpid() == store.owner_process_, "a store belongs to the process that opened it (",
              store.owner_process_, "); open another in this child");
    lock_ = std::unique_lock(store.mutex_);
  }
  ~LockedCall() {
    std::vector<std::shared_ptr<void>> released;
    released.swap(store_.retired_holds_);
    lock_.unlock();
  }
  LockedCall(const LockedCall&) = delete;
  LockedCall& operator=(const LockedCall&) = delete;
  void expect_open() const { MA_EXPECT(!store_.closed_, "the store is closed"); }
  /// Waits until `condition()`, and no longer than `timeout`; returns the condition then. Accounts
  /// the time.
  template <typename Condition>
  bool wait(std::condition_variable& event, std::size_t* waiter_count,
            std::chrono::milliseconds timeout, Condition condition) {
    const auto start = std::chrono::steady_clock::now();
    ++*waiter_count;
    const bool result = event.wait_for(lock_, timeout, condition);
    --*waiter_count;
    store_.wait_time_ += std::chrono::steady_clock::now() - start;
    return result;
  }

 private:
  Store& store_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace memascend

// The entry and exit of every call into a store. Only the store's own files include this.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "nvme/store.hpp"
#include "nvme/wait_account.hpp"

namespace memascend {

/// Holds the mutex, once it has entered. At its end it unlocks, then drops the holds of finished
/// transfers: the destructors of their objects may take other locks (Python's).
class Store::LockedCall {
 public:
  explicit LockedCall(Store& store, Busy busy = Busy::kWait) : store_(store) {
    MA_EXPECT(store.owner_.is_current(), "a store belongs to the process that opened it (",
              store.owner_.number(), "); open another in this child");
    lock_ = std::unique_lock(store.mutex_, std::defer_lock);
    if (busy == Busy::kWait) {
      lock_.lock();
    } else {
      static_cast<void>(lock_.try_lock());
    }
  }
  ~LockedCall() {
    if (!entered()) return;
    std::vector<std::shared_ptr<void>> released;
    released.swap(store_.retired_holds_);
    lock_.unlock();
  }
  LockedCall(const LockedCall&) = delete;
  LockedCall& operator=(const LockedCall&) = delete;
  bool entered() const noexcept { return lock_.owns_lock(); }
  void expect_open() const { MA_EXPECT(!store_.closed_, "the store is closed"); }
  /// Waits until `condition()` or for `timeout`; returns the condition's value. Adds the time to
  /// the store's wait time, unless the thread works in the background. Throws the exceptions of
  /// StoreOptions::while_waiting, and after end_patience() a StoreError for a silent device.
  template <typename Condition>
  bool wait(std::condition_variable& event, std::size_t* waiter_count, Condition condition,
            std::chrono::milliseconds timeout = kForever) {
    const auto start = Clock::now();
    const auto end = start + timeout;
    ++*waiter_count;
    const Afterwards account([&] {
      --*waiter_count;
      if (!waits_behind) store_.wait_time_ += Clock::now() - start;
    });
    const auto wait_slice = [&] {
      if (store_.ending_ && store_.queue_ && !condition()) {
        store_.queue_->refuse_silence(store_.recovery_);
      }
      return event.wait_until(lock_, std::min(end, Clock::now() + kSlice), condition);
    };
    while (!wait_slice()) {
      if (Clock::now() >= end) return false;
      if (store_.while_waiting_) without_lock([&] { store_.while_waiting_(); });
    }
    return true;
  }
  /// Calls `function` without the lock, so that other calls may enter.
  template <typename Function>
  void without_lock(Function function) {
    lock_.unlock();
    const Afterwards relock([&] { lock_.lock(); });
    function();
  }

  /// Calls a function at the end of the scope, also after an exception.
  template <typename Function>
  class Afterwards {
   public:
    explicit Afterwards(Function function) : function_(std::move(function)) {}
    ~Afterwards() { function_(); }
    Afterwards(const Afterwards&) = delete;
    Afterwards& operator=(const Afterwards&) = delete;

   private:
    Function function_;
  };

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kSlice{200};  // between two checks for Ctrl-C

  Store& store_;
  std::unique_lock<std::mutex> lock_;
};

/// A call about space: takes extents for a key, and at the end gives back those that belong to no
/// key. Other calls continue while the file system, or the owner of checksum memory, is asked.
/// close() waits for that part only: a signal handler may close the store on a thread that waits in
/// here.
class Store::SpaceCall {
 public:
  SpaceCall(Store& store, LockedCall& call) : store_(store), call_(call) {}
  ~SpaceCall() {
    if (spare_.empty() || store_.closed_) return;
    ++store_.giving_count_;
    with_space([this](Space& space) { space.give(spare_); });
    --store_.giving_count_;
    ++store_.given_count_;
  }
  SpaceCall(const SpaceCall&) = delete;
  SpaceCall& operator=(const SpaceCall&) = delete;
  LockedCall& locked() { return call_; }
  void take(const std::string& key, std::uint64_t nbytes) {
    with_space([&](Space& space) { spare_ = space.take(key, nbytes); });
    call_.expect_open();
  }
  std::uint64_t available_bytes() {
    std::uint64_t nbytes = 0;
    with_space([&](Space& space) { nbytes = space.available_bytes(); });
    return nbytes;
  }
  void shrink() {
    with_space([](Space& space) { space.shrink(); });
  }
  /// Pre: the store keeps checksums.
  void provide_checksums(std::uint64_t nbytes) {
    with_space([&](Space&) { store_.checksums_->provide(nbytes); });
  }
  /// Swaps the entry's extents with the spare ones.
  void exchange(std::vector<Extent>& extents) { spare_.swap(extents); }

 private:
  template <typename Function>
  void with_space(Function function) {
    ++store_.space_call_count_;
    const LockedCall::Afterwards count([this] {
      --store_.space_call_count_;
      if (store_.quiet_waiter_count_ > 0) store_.quiet_.notify_all();
    });
    call_.without_lock([&] {
      const std::lock_guard lock(store_.space_mutex_);
      function(store_.space_);
    });
  }

  Store& store_;
  LockedCall& call_;
  std::vector<Extent> spare_;
};

}  // namespace memascend
